"""Model families against transformers: tiny random models, and ranks that are real processes.

A case is a Hugging Face config, its random state dict, inputs, and what transformers computes. The
parent makes cases and writes them; rank processes load and run them without transformers.
"""

from __future__ import annotations

import importlib
import json
import os
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.multiprocessing.spawn import spawn

from loadkit.config import LoadkitConfig, ModelConfig, ParallelConfig

__all__ = ["Case", "build", "fill_with_nan", "fused", "load", "positions_of", "run_on_four_ranks"]

Tensors = dict[str, torch.Tensor]


@dataclass
class Case:
    """``ids [T]`` and ``borders [B + 1]`` go in, ``hidden [T, D]`` (and ``logits``) come out."""

    model: str  # "module:Class"
    config: dict[str, Any]
    weights: Tensors
    ids: torch.Tensor
    borders: list[int]
    hidden: torch.Tensor
    logits: torch.Tensor | None = None
    first_position: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

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


def run_on_four_ranks(cases: dict[str, Case], folder: Path) -> dict[str, list[Tensors]]:
    """Each case at tp 2 (twice, side by side) and tp 4, by four gloo processes.

    Returns:
        ``"{case}/tp{n}"`` to each rank's outputs.
    """
    for name, case in cases.items():
        case.save(folder / name)
    # The parent holds the store, so that no rank that ends early takes it along.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    spawn(_rank, args=(folder, store.port), nprocs=4)
    ranks = [load_file(folder / f"rank{rank}.st") for rank in range(4)]
    results: dict[str, list[Tensors]] = {}
    for rank, tensors in enumerate(ranks):
        for key, value in tensors.items():
            place, _, output = key.rpartition("/")
            results.setdefault(place, [{} for _ in ranks])[rank][output] = value
    return results


def _rank(rank: int, folder: Path, port: int) -> None:
    """One process: every case at tp 2 and at tp 4."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    from loadkit_layers.communication import init_parallel_groups

    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    try:
        pairs = ParallelConfig(dp_size=2, dp_rank=rank // 2, tp_size=2, tp_rank=rank % 2)
        init_parallel_groups(pairs)
        out: Tensors = {}
        for place in sorted(path for path in folder.iterdir() if path.is_dir()):
            case = json.loads((place / "case.json").read_text())
            weights, ids = load_file(place / "weights.st"), load_file(place / "ids.st")["ids"]
            for parallel in (pairs, ParallelConfig(tp_size=4, tp_rank=rank)):
                model = build(case["model"], case["config"], parallel)
                load(model, weights)
                got = run(model, ids, case["borders"], case["first_position"], case["logits"])
                for key, value in got.items():
                    out[f"{place.name}/tp{parallel.tp_size}/{key}"] = value.clone()
        save_file(out, folder / f"rank{rank}.st")
        dist.barrier()  # no rank leaves while another still talks to it
    finally:
        dist.destroy_process_group()
