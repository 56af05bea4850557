"""Model families against transformers: tiny random models, built, filled and run.

A case is a Hugging Face config, its random state dict, inputs, and what transformers computes. The
parent makes cases and writes them; rank processes (``four_ranks``) run them without transformers.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from loadkit.config import LoadkitConfig, ModelConfig, ParallelConfig
from loadkit.expert_placement import ExpertPlacement
from loadkit_layers.attention import Attention
from loadkit_layers.kv_cache import KVCache

__all__ = [
    "DECODED",
    "Case",
    "build",
    "decode",
    "fill_with_nan",
    "fused",
    "layouts_of",
    "load",
    "positions_of",
    "run",
    "run_case",
]

Tensors = dict[str, torch.Tensor]
DECODED = 5  # tokens that ranks compute one by one: past a window of 4, and past a cache of 4


@dataclass
class Case:
    """``ids [T]`` and ``borders [B + 1]`` go in, ``hidden [T, D]`` (and ``logits``) come out.

    With ``decode`` its first tokens are also computed one by one, with caches. ``layouts``
    are more ways to lay the model over four ranks: name to what ``ParallelConfig.for_rank`` takes.
    """

    model: str  # "module:Class"
    config: dict[str, Any]
    weights: Tensors
    ids: torch.Tensor
    borders: list[int]
    hidden: torch.Tensor
    logits: torch.Tensor | None = None
    first_position: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    decode: bool = False
    layouts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write what a rank process needs."""
        folder.mkdir(parents=True)
        save_file({k: v.contiguous() for k, v in self.weights.items()}, folder / "weights.st")
        save_file({"ids": self.ids}, folder / "ids.st")
        rest = {
            "model": self.model,
            "config": self.config,
            "borders": self.borders,
            "first_position": self.first_position,
            "logits": self.logits is not None,
            "decode": self.decode,
            "layouts": self.layouts,
        }
        (folder / "case.json").write_text(json.dumps(rest))


def positions_of(borders: list[int], first: int = 0) -> torch.Tensor:
    """Each sequence counts from ``first``: ``[T]``."""
    return torch.cat([torch.arange(first, first + b - a) for a, b in pairwise(borders)])


def build(
    model: str, config: dict[str, Any], parallel: ParallelConfig | None = None, source: str = ""
) -> Any:
    """The model on this rank, float32, every parameter NaN until it is loaded."""
    module, _, name = model.partition(":")
    bundle = LoadkitConfig(
        model_config=ModelConfig.from_dict(config, source=source, dtype="float32"),
        parallel_config=parallel or ParallelConfig(),
    )
    made = getattr(importlib.import_module(module), name)(config=bundle)
    fill_with_nan(made)
    return made.eval()


def fill_with_nan(model: nn.Module) -> None:
    """So that an element nobody loads cannot pass for a number."""
    for param in model.parameters():
        param.data.fill_(float("nan"))


def load(model: Any, weights: Tensors) -> set[str]:
    """``model.load_weights`` of real tensors; every element has to be written."""
    loaded: set[str] = model.load_weights(iter(weights.items()))
    for name, param in model.named_parameters():
        assert not param.isnan().any(), f"{name} has elements that were never loaded"
    return loaded


def fused(weights: Tensors) -> Tensors:
    """The same weights with q, k, v (gate, up) fused on disk, as some savers write them."""
    groups = {
        ("q_proj", "k_proj", "v_proj"): "qkv_proj",
        ("gate_proj", "up_proj"): "gate_up_proj",
        ("query", "key", "value"): "qkv_proj",
    }
    out = dict(weights)
    for parts, whole in groups.items():
        for name in [name for name in weights if f".{parts[0]}." in name]:
            names = [name.replace(f".{parts[0]}.", f".{part}.") for part in parts]
            out[name.replace(f".{parts[0]}.", f".{whole}.")] = torch.cat(
                [out.pop(n) for n in names]
            )
    return out


def run(model: Any, ids: torch.Tensor, borders: list[int], first: int, logits: bool) -> Tensors:
    """One forward over all sequences."""
    with torch.inference_mode():
        hidden = model(ids, positions_of(borders, first), cu_seqlens=borders)
        out = {"hidden": hidden}
        if logits:
            out["logits"] = model.compute_logits(hidden)
        if getattr(model, "pooler", None) is not None:
            out["pooler_output"] = model.pooler_output(hidden, borders)
    return out


def decode(model: Any, ids: torch.Tensor, prompt: int = 1) -> torch.Tensor:
    """Hidden states ``[T, D]`` of one sequence: ``prompt`` tokens at once, then one by one.

    A cache is bound to each attention for it, and taken away afterwards.
    """
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    for attention in attentions:
        attention.kv_cache = KVCache(capacity=4)  # so that it has to grow
    starts = [0, *range(prompt, len(ids)), len(ids)]
    with torch.inference_mode():
        parts = [model(ids[a:b], torch.arange(a, b)) for a, b in pairwise(starts)]
    for attention in attentions:
        attention.kv_cache = None
    return torch.cat(parts)


def layouts_of(folder: Path, rank: int) -> dict[str, ParallelConfig]:
    """A rank's place in each of a saved case's own layouts."""
    case = json.loads((folder / "case.json").read_text())
    found = {}
    for name, sizes in case["layouts"].items():
        placement = sizes.get("expert_placement")
        if placement is not None:
            sizes = {**sizes, "expert_placement": ExpertPlacement.from_dict(placement)}
        found[name] = ParallelConfig.for_rank(rank, **sizes)
    return found


def run_case(folder: Path, parallel: ParallelConfig) -> Tensors:
    """Build, fill and run a saved case on this rank."""
    case = json.loads((folder / "case.json").read_text())
    ids = load_file(folder / "ids.st")["ids"]
    model = build(case["model"], case["config"], parallel)
    load(model, load_file(folder / "weights.st"))
    got = run(model, ids, case["borders"], case["first_position"], case["logits"])
    if case["decode"]:
        got["decoded"] = decode(model, ids[:DECODED])
    return got
