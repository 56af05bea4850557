"""Rows of q and k: pairs that rotate together are neighbours in some files, halves in others.

Hugging Face, and all models here, rotate row ``i`` of a head with row ``i + size / 2``. Files of
Mistral, Meta and llama.cpp have the two beside each other. Plain views and one reshape: a lazy
tensor's rows stay rows of the file.
"""

from __future__ import annotations

import torch

from loadkit.errors import WeightLoadError
from loadkit.file_checks import show

__all__ = ["as_halves", "as_neighbours"]


def as_halves(name: str, tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows ``[heads * size, ...]`` that pair neighbours, in Hugging Face's order.

    Raises:
        WeightLoadError: the rows are not so many heads of an even size.
    """
    rows, rest = _rows_of(name, tensor, heads), tensor.shape[1:]
    pairs = tensor.reshape(heads, rows // heads // 2, 2, *rest)
    return pairs.transpose(1, 2).reshape(rows, *rest)


def as_neighbours(name: str, tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """What ``as_halves`` takes back.

    Raises:
        WeightLoadError: as there.
    """
    rows, rest = _rows_of(name, tensor, heads), tensor.shape[1:]
    halves = tensor.reshape(heads, 2, rows // heads // 2, *rest)
    return halves.transpose(1, 2).reshape(rows, *rest)


def _rows_of(name: str, tensor: torch.Tensor, heads: int) -> int:
    rows = tensor.shape[0] if tensor.dim() else 0
    if heads < 1 or rows < 1 or rows % (2 * heads):
        raise WeightLoadError(
            f"{show(name)} has {rows} rows, which are no {heads} heads of an even size",
            tensor=name,
        )
    return int(rows)
