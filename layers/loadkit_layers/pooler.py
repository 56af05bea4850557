"""One vector per sequence out of one per token.

# T tokens, B sequences, D model width
"""

from __future__ import annotations

from enum import Enum

import torch
import torch.nn.functional as F
from torch import nn

from loadkit.errors import UsageError
from loadkit_layers.sequences import CuSeqlens, sequence_spans

__all__ = ["Pooler", "PoolingType"]


class PoolingType(Enum):
    """Which tokens stand for their sequence."""

    CLS = "cls"
    LAST = "last"
    MEAN = "mean"


class Pooler(nn.Module):
    """Pools hidden states by sequence.

    Args:
        pooling_type: first token, last token, or the mean of all; its name will do.
        normalize: give vectors of length 1.

    Raises:
        UsageError: no such pooling type.
    """

    def __init__(
        self, pooling_type: PoolingType | str = PoolingType.MEAN, normalize: bool = False
    ) -> None:
        super().__init__()
        try:
            self.pooling_type = PoolingType(
                pooling_type.lower() if isinstance(pooling_type, str) else pooling_type
            )
        except ValueError:
            known = ", ".join(kind.value for kind in PoolingType)
            raise UsageError(f"no pooling type {pooling_type!r}; there are {known}") from None
        self.normalize = normalize

    def forward(self, hidden: torch.Tensor, cu_seqlens: CuSeqlens = None) -> torch.Tensor:
        """Pool ``hidden [T, D]`` to ``[B, D]``; ``cu_seqlens [B + 1]`` are the sequences' borders.

        A mean is taken in float32 and given in the dtype of ``hidden``.

        Raises:
            UsageError: the borders do not fit, or a sequence has no token to pool.
        """
        spans = sequence_spans(cu_seqlens, hidden.shape[0])
        empty = [index for index, (start, end) in enumerate(spans) if start == end]
        if empty:
            raise UsageError(f"sequence {empty[0]} of {len(spans)} has no token to pool")
        if self.pooling_type is PoolingType.MEAN:
            rows = [hidden[start:end].mean(dim=0, dtype=torch.float32) for start, end in spans]
            pooled = torch.stack(rows)
        else:
            first = self.pooling_type is PoolingType.CLS
            pooled = hidden[[start if first else end - 1 for start, end in spans]]
        if self.normalize:
            pooled = F.normalize(pooled, dim=-1)
        return pooled.to(hidden.dtype)

    def extra_repr(self) -> str:
        return f"{self.pooling_type.value}, normalize={self.normalize}"
