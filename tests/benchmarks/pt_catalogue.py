"""A ``.bin`` of 20,000 tensors: what is in it, against ``torch.load``, which also reads it.

The tensors are small, so that torch's time is its unpickling and not its reading. Neither imports
nor writing the file are measured.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Variant

__all__ = ["catalogue_variants", "write_many"]

Go = Callable[[], Any]


def write_many(path: Path, tensors: int) -> Path:
    """The archive, written once."""
    if not path.is_file():
        names = (f"model.layers.{n // 10}.block.{n % 10}.weight" for n in range(tensors))
        torch.save({name: torch.zeros(4, 4) for name in names}, path)
    return path


def by_torch(path: str, mmap: bool = False) -> Go:
    """``torch.load`` with ``weights_only``: every tensor, in memory or mapped."""

    def go() -> dict[str, Any]:
        found = torch.load(path, weights_only=True, mmap=mmap)
        return {"tensors": len(found)}

    return go


def by_loadkit(path: str, lazies: bool = False) -> Go:
    """The default loader's offers; with ``lazies`` a lazy tensor of each of them."""
    from loadkit.config import LoadConfig
    from loadkit.sources.local import LocalSource
    from loadkit.tracing.lazy_tensor import Offered
    from loadkit_default.loader import DefaultModelLoader

    def go() -> dict[str, Any]:
        config = LoadConfig(load_format="pt")
        with LocalSource(path, config) as source:
            loader = DefaultModelLoader(config)
            loader.source = source
            model_config: Any = None  # it is not asked
            found = list(loader.offers(model_config))
            if lazies:
                found = [(n, t.tensor() if isinstance(t, Offered) else t) for n, t in found]
        return {"tensors": len(found)}

    return go


def catalogue_variants(path: Path) -> list[Variant]:
    """Who says what is in the file."""
    at = {"path": str(path)}
    return [
        Variant("torch.load", "pt_catalogue:by_torch", at),
        Variant("torch.load, mapped", "pt_catalogue:by_torch", {**at, "mmap": True}),
        Variant("loadkit", "pt_catalogue:by_loadkit", at),
        Variant("loadkit, lazy tensors made", "pt_catalogue:by_loadkit", {**at, "lazies": True}),
    ]
