"""Variants with known figures, for the harness's own test."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def allocate(mib: int) -> Callable[[], list[torch.Tensor]]:
    """Fill so much memory, and half of it again for a moment."""
    import torch

    def go() -> list[torch.Tensor]:
        kept = torch.ones(mib << 20, dtype=torch.uint8)
        passing = torch.ones(mib << 19, dtype=torch.uint8)
        time.sleep(0.02)
        del passing
        return [kept]

    return go


def read(path: str) -> Callable[[], dict[str, int]]:
    """Read a file."""
    return lambda: {"bytes": len(Path(path).read_bytes())}


def permuted(backwards: bool) -> Callable[[], list[torch.Tensor]]:
    """The same numbers in another order and in other tensors."""
    import torch

    numbers = torch.arange(10_003, dtype=torch.int32)
    if backwards:
        return lambda: [numbers.flip(0)]
    return lambda: [numbers[:4000].clone(), numbers[4000:].clone()]


def fail() -> Callable[[], None]:
    """Fail while it is measured."""

    def go() -> None:
        raise RuntimeError("no such luck")

    return go
