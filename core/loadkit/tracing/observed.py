"""Weights on their way to a model: seen by the recorder, tensors for whoever takes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from loadkit.tracing.lazy_tensor import Offered

__all__ = ["Observed", "observed", "offers_of"]


class Observed(Iterator[tuple[str, torch.Tensor]]):
    """Weights on their way through ``Recorder.observe``. ``offers``: they, as they were offered."""

    def __init__(self, offers: Iterator[tuple[str, torch.Tensor | Offered]]) -> None:
        self.offers = offers

    def __next__(self) -> tuple[str, torch.Tensor]:
        name, tensor = next(self.offers)
        return name, tensor.tensor() if isinstance(tensor, Offered) else tensor


def observed(
    weights: Iterable[tuple[str, torch.Tensor | Offered]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights, as tensors for whoever takes them; a recorder takes them as observed already."""
    return Observed(iter(weights))


def offers_of(
    weights: Iterable[tuple[str, torch.Tensor]],
) -> Iterable[tuple[str, torch.Tensor | Offered]]:
    """The weights as they were offered, for code that looks at names before it takes tensors."""
    return weights.offers if isinstance(weights, Observed) else weights
