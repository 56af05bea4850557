"""A mixture of experts into fused experts: loadkit against transformers."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.dense import loading
from benchmarks.generate import MOE_TOY, written

__all__ = ["loadkit", "transformers", "variants"]

Go = Callable[[], Any]


def transformers(folder: str) -> Go:
    """``from_pretrained`` in bfloat16: experts become one tensor per layer."""
    library: Any = importlib.import_module("transformers")
    library.utils.logging.disable_progress_bar()
    model_class = library.Qwen3MoeForCausalLM
    model_class.from_pretrained(str(written(MOE_TOY)), dtype=torch.bfloat16)
    return lambda: model_class.from_pretrained(folder, dtype=torch.bfloat16)


def loadkit(folder: str, **load_config: Any) -> Go:
    """``loadkit.load`` of the Qwen3-MoE family."""
    return loading(written(MOE_TOY), Path(folder), load_config)


def variants(folder: Path) -> list[dict[str, Any]]:
    """Every variant, as keyword arguments of ``Variant``."""
    at = {"folder": os.fspath(folder)}
    return [
        {"name": "floor: one buffer, over and over", "call": "dense:floor", "args": at},
        {
            "name": "floor: fresh memory, 2 threads",
            "call": "dense:floor",
            "args": {**at, "threads": 2, "memory": "fresh"},
        },
        {
            "name": "transformers",
            "call": "moe:transformers",
            "args": at,
            "needs": ("transformers",),
        },
        {"name": "loadkit", "call": "moe:loadkit", "args": at},
        {"name": "loadkit, alias never", "call": "moe:loadkit", "args": {**at, "alias": "never"}},
    ]
