"""Borders of the sequences that lie one after another in a batch without padding."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

import torch

from loadkit.errors import UsageError

__all__ = ["CuSeqlens", "sequence_spans"]

CuSeqlens: TypeAlias = torch.Tensor | Sequence[int] | None


def sequence_spans(cu_seqlens: CuSeqlens, total: int) -> list[tuple[int, int]]:
    """``(start, end)`` of each sequence among ``total`` tokens.

    Args:
        cu_seqlens: ``[B + 1]`` running totals: 0, then the end of each sequence; the last is
            ``total``. None is one sequence. Empty sequences are legal.

    Raises:
        UsageError: the borders do not describe ``total`` tokens.
    """
    if cu_seqlens is None:
        return [(0, total)]
    flat = cu_seqlens.tolist() if isinstance(cu_seqlens, torch.Tensor) else list(cu_seqlens)
    spans = list(pairwise(flat))
    if not spans or flat[0] != 0 or flat[-1] != total or any(a > b for a, b in spans):
        shown = f"{flat[:8]}{'...' if len(flat) > 8 else ''}"
        raise UsageError(
            f"cu_seqlens {shown} does not describe {total} tokens",
            hint="it starts at 0, never falls, and ends at the number of tokens",
        )
    return spans
