"""Tables that spread packed bits and codes over bytes, made once when first asked for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

__all__ = ["bits_as_bytes", "code_pairs"]


@cache
def bits_as_bytes(clear: int, is_set: int) -> torch.Tensor:
    """int64 [256]: entry i is eight bytes, byte j ``is_set`` or ``clear`` as bit j of i is."""
    bits = (torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1
    values = torch.where(bits.bool(), is_set, clear).to(torch.uint8)
    return values.view(torch.int64).view(-1)


@cache
def code_pairs(codes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Two int16 [65536]: for two bytes, the codes (int8) of their low halves, of their high ones.

    Args:
        codes: the 16 values that four bits stand for.
    """
    table = torch.tensor(codes, dtype=torch.int8)
    pair = torch.arange(1 << 16)
    low = torch.stack([table[pair & 15], table[(pair >> 8) & 15]], dim=1)
    high = torch.stack([table[(pair >> 4) & 15], table[pair >> 12]], dim=1)
    return low.view(torch.int16).view(-1), high.view(torch.int16).view(-1)
