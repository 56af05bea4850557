"""Types of four-bit floats (MXFP4, NVFP4) and of base-3 digits (TQ1_0). N blocks.

Source: ``dequantize_row_*`` of ``ggml-quants.c``.
"""

from __future__ import annotations

from functools import cache

import torch

from loadkit_gguf.decode_basic import half
from loadkit_gguf.decode_iq import coded

__all__ = ["mxfp4", "nvfp4", "tq1_0"]

_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled


@cache
def _half_e8m0() -> torch.Tensor:
    """float32 [256]: half of two to the power of (byte - 127)."""
    byte = torch.arange(256, dtype=torch.int32)
    bits = torch.where(byte < 2, 0x00200000 << byte.clamp(max=1), (byte - 1) << 23)
    return bits.int().view(torch.float32)


@cache
def _half_ue4m3() -> torch.Tensor:
    """float32 [256]: half of an unsigned float of four exponent and three mantissa bits."""
    byte = torch.arange(256)
    exponent, mantissa = ((byte >> 3) & 15).float(), (byte & 7).float()
    small = mantissa * 2.0**-9
    value = torch.where(exponent == 0, small, (1 + mantissa / 8) * torch.exp2(exponent - 7)) * 0.5
    value[[0, 0x7F]] = 0.0
    return value


def mxfp4(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """A power of two, 16 bytes of two codes."""
    scale = _half_e8m0().index_select(0, blocks[:, 0].int()).unsqueeze(-1)
    out.copy_(coded(blocks[:, 1:], _E2M1, 16).view(out.shape)).mul_(scale)


def nvfp4(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Four scales, four times 8 bytes of two codes."""
    scale = _half_ue4m3().index_select(0, blocks[:, :4].int().view(-1)).view(-1, 4, 1)
    out.copy_(coded(blocks[:, 4:], _E2M1, 8).view(out.shape))
    out.view(-1, 4, 16).mul_(scale)


def tq1_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """48 bytes of five digits, 4 of four (base 3, as fractions of 256), ``d``: ``d*(digit-1)``.

    A byte's first digit is ``byte * 3 >> 8``; what overflows ``byte * 3`` is the rest.
    """
    rest = blocks[:, :52].contiguous()
    for place in range(5):
        digit = (rest >= 86).view(torch.int8) + (rest >= 171).view(torch.int8)
        digit.sub_(1)
        out[:, place * 32 : place * 32 + 32].copy_(digit[:, :32])
        out[:, 160 + place * 16 : 176 + place * 16].copy_(digit[:, 32:48])
        if place < 4:
            out[:, 240 + place * 4 : 244 + place * 4].copy_(digit[:, 48:])
            rest.mul_(3)
    out.mul_(half(blocks, 52))
