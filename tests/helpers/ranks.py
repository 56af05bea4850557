"""Every rank of a layer in one process, and which tensor operations its weight loaders use.

R tp size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from loadkit.config import ParallelConfig

__all__ = ["build_ranks", "only_views_and_writes", "parallel_of", "randn", "unchanged_by"]

T = TypeVar("T")

# Views, detaches and writes: what a recorder follows without computing anything.
TRACEABLE = {
    "alias",
    "copy_",
    "detach",
    "fill_",
    "narrow",
    "select",
    "slice",
    "split",
    "split_with_sizes",
    "view",
    "zero_",
}


def parallel_of(tp_size: int) -> list[ParallelConfig]:
    """The places of all R ranks, in order."""
    return [ParallelConfig(tp_size=tp_size, tp_rank=rank) for rank in range(tp_size)]


def build_ranks(tp_size: int, make: Callable[[ParallelConfig], T]) -> list[T]:
    """One layer per rank."""
    return [make(parallel) for parallel in parallel_of(tp_size)]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Seeded normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@contextmanager
def only_views_and_writes() -> Iterator[None]:
    """Fail if the block does anything with a tensor but take views of it and write to it."""
    with _Watch() as watch:
        yield
    assert set(watch.seen) <= TRACEABLE, sorted(set(watch.seen) - TRACEABLE)
    assert {"copy_", "fill_"} & set(watch.seen)


@contextmanager
def unchanged_by(param: torch.Tensor) -> Iterator[None]:
    """Fail if the block changes the parameter."""
    before = param.detach().clone()
    yield
    assert torch.equal(param, before)
