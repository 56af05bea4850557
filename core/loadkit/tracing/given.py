"""What a model's own ``load_weights`` was given: names, shapes and dtypes, no tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from loadkit.tracing.lazy_tensor import Offered

__all__ = ["Given", "noted"]


class Given(NamedTuple):
    """A checkpoint tensor as a model sees it; ``stored`` is its name in the file."""

    size: tuple[int, ...]
    dtype: torch.dtype
    stored: str


def noted(
    weights: Iterable[tuple[str, torch.Tensor | Offered]], into: dict[str, Given]
) -> Iterator[tuple[str, torch.Tensor | Offered]]:
    """Pass weights on, and note what they are."""
    for name, tensor in weights:
        stored = getattr(name, "checkpoint_name", name)
        into[str(name)] = Given(tuple(tensor.size()), tensor.dtype, str(stored))
        yield name, tensor
