"""Archives of ``torch.save``, and their cache as numpy files, into a model's parameters.

The module has one parameter for each tensor. ``torch.load`` gives it its own tensors (``assign``),
in memory or mapped; numpy reads the very files of the cache and makes no model of them.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.dense import loading
from benchmarks.generate import CACHE, TOY, Llama, with_architecture, written
from benchmarks.harness import Variant

__all__ = ["archived", "cache_files", "npcache_variants", "pt_variants"]

Go = Callable[[], Any]
CACHES = CACHE / "numpy"
FLOOR = "floor: one buffer, over and over"


def archived(model: Llama) -> Path:
    """A checkpoint as ``.bin`` files, one of each safetensors file; written if not there."""
    from safetensors.torch import load_file

    source = written(model)
    folder = source.with_name(f"{source.name}-bin")
    if not (folder / "config.json").is_file():
        folder.mkdir(exist_ok=True)
        for path in sorted(source.glob("*.safetensors")):
            name = path.name.replace("model", "pytorch_model").replace(".safetensors", ".bin")
            torch.save(load_file(str(path)), folder / name)
        (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    return folder


def by_torch(folder: str, mmap: bool = False) -> Go:
    """``torch.load`` of each file, and ``load_state_dict`` of a module on meta."""
    _by_torch(archived(TOY), mmap)
    return lambda: _by_torch(Path(folder), mmap)


def _by_torch(folder: Path, mmap: bool) -> torch.nn.Module:
    model: Any = _unfused(folder)
    state: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.bin")):
        state |= torch.load(path, weights_only=True, mmap=mmap)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    made: torch.nn.Module = model
    return made


def _unfused(folder: Path) -> torch.nn.Module:
    """The module that loadkit fills too, on meta."""
    from benchmarks.unfused import UnfusedLlama
    from loadkit.config import LoadConfig, LoadkitConfig, ModelConfig
    from loadkit.sources.local import LocalSource

    with LocalSource(str(folder), LoadConfig()) as source:
        config = LoadkitConfig(model_config=ModelConfig.from_source(source, dtype="bfloat16"))
    with torch.device("meta"):
        return UnfusedLlama(config=config).to(torch.bfloat16)


def by_loadkit(folder: str, load_format: str, alias: str = "auto") -> Go:
    """``loadkit.load`` into the same module."""
    from benchmarks.unfused import UnfusedLlama
    from loadkit.model_registry import ModelRegistry

    name = UnfusedLlama.__name__
    ModelRegistry.register_model(name, UnfusedLlama)
    config: dict[str, Any] = {"load_format": load_format, "alias": alias}
    if load_format == "npcache":
        config["cache_dir"] = str(CACHES)
    toy = with_architecture(archived(TOY), name)
    return loading(toy, with_architecture(Path(folder), name), config)


def cache_files(folder: Path) -> list[Path]:
    """The numpy files that ``npcache`` makes of a folder, made by a plan where they are missing."""
    loadkit: Any = importlib.import_module("loadkit")
    from benchmarks.unfused import UnfusedLlama
    from loadkit.model_registry import ModelRegistry

    name = UnfusedLlama.__name__
    ModelRegistry.register_model(name, UnfusedLlama)
    config = loadkit.LoadConfig(load_format="npcache", cache_dir=str(CACHES))
    plan = loadkit.plan(str(with_architecture(folder, name)), load_config=config)
    names = {row.file for row in plan.rows if row.file}
    return sorted(path for path in CACHES.rglob("*.npy") if path.name in names)


def by_numpy(files: list[str], mmap: bool = False) -> Go:
    """``numpy.load``: bytes in memory or mapped, as tensors."""
    import warnings

    import numpy as np

    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")

    def go() -> list[torch.Tensor]:
        loaded = (np.load(path, mmap_mode="r" if mmap else None) for path in files)
        return [torch.from_numpy(numbers) for numbers in loaded]

    return go


def pt_variants(folder: Path) -> list[Variant]:
    """torch and loadkit, with memory of their own and mapped."""
    at = {"folder": os.fspath(folder)}
    ours = {**at, "load_format": "pt"}
    return [
        Variant(FLOOR, "dense:floor", {**at, "pattern": "*.bin"}),
        Variant("torch.load", "pt_format:by_torch", at),
        Variant("loadkit, alias never", "pt_format:by_loadkit", {**ours, "alias": "never"}),
        Variant("torch.load, mapped", "pt_format:by_torch", {**at, "mmap": True}),
        Variant("loadkit", "pt_format:by_loadkit", ours),
    ]


def npcache_variants(folder: Path, files: list[Path]) -> list[Variant]:
    """numpy and loadkit, with memory of their own and mapped."""
    ours = {"folder": os.fspath(folder), "load_format": "npcache"}
    theirs = {"files": [os.fspath(path) for path in files]}
    at = {"folder": os.fspath(files[0].parent), "pattern": "*.npy"}
    return [
        Variant(FLOOR, "dense:floor", at),
        Variant("numpy.load", "pt_format:by_numpy", theirs),
        Variant("loadkit, alias never", "pt_format:by_loadkit", {**ours, "alias": "never"}),
        Variant("numpy.load, mapped", "pt_format:by_numpy", {**theirs, "mmap": True}),
        Variant("loadkit", "pt_format:by_loadkit", ours),
    ]
