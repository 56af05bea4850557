"""K types: super-blocks of 256 with scales of their parts, Q2_K to Q6_K; and TQ2_0, packed alike.

N super-blocks. Their numbers come in eight parts of 32, and the same bit of 32 bytes is one part's.
So work goes on in *planes*: all blocks' bytes of one kind side by side, long rows that vector
instructions like, put in order by the one copy that makes them float32.

Source: ``dequantize_row_q*_K`` of ``ggml-quants.c``.
"""

from __future__ import annotations

from functools import cache

import torch

from loadkit_gguf.decode_basic import half

__all__ = ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "tq2_0"]

# Masks of four bytes at a time.
_LOW_2 = 0x03030303
_LOW_4 = 0x0F0F0F0F
_LOW_6 = 0x3F3F3F3F
_HIGH_2 = 0x30303030


def q2_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """16 bytes (scale, minimum), 64 bytes of four, ``d``, ``dmin``: ``d*sc*q - dmin*m``."""
    _store(_two_bits(blocks[:, 16:80]), out)
    scales = blocks[:, :16].contiguous()
    scale = (scales & 15).float().mul_(half(blocks, 80))
    minimum = (scales >> 4).float().mul_(half(blocks, 82))
    out.view(-1, 16).mul_(scale.view(-1, 1)).sub_(minimum.view(-1, 1))


def q3_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """32 bytes of high bits, 64 bytes of four, 12 of scales, ``d``: ``d*(sc-32)*(q-4)``."""
    high = blocks[:, :32].bitwise_not().view(1, -1)
    minus = (high << _amounts(7, -1, 8)).bitwise_and_(0x80)
    minus.view(torch.int8).bitwise_right_shift_(5)  # -128 to -4: or-ed with q it gives q - 4
    values = _two_bits(blocks[:, 32:96]).view(-1).bitwise_or_(minus.view(-1))
    _store(values.view(torch.int8), out)
    scale = _scales_of_q3(blocks[:, 96:108]).float().sub_(32).mul_(half(blocks, 108))
    out.view(-1, 16).mul_(scale.view(-1, 1))


def q4_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """``d``, ``dmin``, 12 bytes of scales, 128 bytes of two: ``d*sc*q - dmin*m``."""
    _store(_four_bits(blocks[:, 16:]), out)
    _scale_and_minimum(blocks, out)


def q5_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """As Q4_K, with 32 bytes of fifth bits before the 128."""
    fifth = blocks[:, 16:48].contiguous().view(1, -1) >> _amounts(0, 1, 8)
    fifth.bitwise_and_(1).bitwise_left_shift_(4)
    _store(_four_bits(blocks[:, 48:]).view(-1).bitwise_or_(fifth.view(-1)), out)
    _scale_and_minimum(blocks, out)


def q6_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """128 bytes of two low, 64 of four high, 16 signed scales, ``d``: ``d*sc*(q-32)``."""
    low = _planes(blocks[:, :128], 4).view(2, 2, -1)
    values = torch.empty(2, 4, low.shape[-1], dtype=torch.uint8)
    torch.bitwise_and(low, 15, out=values[:, :2])
    torch.bitwise_right_shift(low, 4, out=values[:, 2:])
    high = _two_bits(blocks[:, 128:192]).bitwise_left_shift_(4)
    _store(values.bitwise_or_(high).view(torch.int8).sub_(32), out)
    scale = blocks[:, 192:208].view(torch.int8).float().mul_(half(blocks, 208))
    out.view(-1, 16).mul_(scale.view(-1, 1))


def tq2_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """64 bytes of four digits, ``d``: ``d * (digit - 1)``."""
    _store(_two_bits(blocks[:, :64]).view(torch.int8).sub_(1), out)
    out.mul_(half(blocks, 64))


# -- planes ----------------------------------------------------------------------------------------


def _planes(packed: torch.Tensor, count: int) -> torch.Tensor:
    """[count, N * 32] of [N, count * 32] bytes."""
    planes = packed.view(-1, count, 32).transpose(0, 1)
    return planes.contiguous().view(count, -1)


def _store(planes: torch.Tensor, out: torch.Tensor) -> None:
    """Eight planes (any shape, in order) to float32 [N, 256]."""
    count = out.shape[0]
    out.view(count, 8, 32).copy_(planes.view(8, count, 32).transpose(0, 1))


def _two_bits(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [2, 4, N * 32] of [N, 64] bytes: each 32 hold four planes."""
    planes = _planes(packed, 2).view(2, 1, -1)
    return (planes >> _amounts(0, 2, 4)).bitwise_and_(3)


def _four_bits(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [4, 2, N * 32] of [N, 128] bytes: each 32 hold two planes."""
    planes = _planes(packed, 4)
    values = torch.empty(4, 2, planes.shape[1], dtype=torch.uint8)
    torch.bitwise_and(planes, 15, out=values[:, 0])
    torch.bitwise_right_shift(planes, 4, out=values[:, 1])
    return values


@cache
def _amounts(first: int, step: int, count: int) -> torch.Tensor:
    """uint8 [count, 1]: how far each plane is shifted."""
    amounts = [first + step * n for n in range(count)]
    return torch.tensor(amounts, dtype=torch.uint8).unsqueeze(1)


# -- scales ----------------------------------------------------------------------------------------


def _scale_and_minimum(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Of Q4_K and Q5_K: eight parts of 32, each ``d*sc*q - dmin*m`` by six-bit sc and m."""
    words = blocks[:, 4:16].contiguous().view(torch.int32)
    six, upper = words & _LOW_6, (words >> 2) & _HIGH_2
    scale = torch.stack([six[:, 0], (words[:, 2] & _LOW_4) | upper[:, 0]], dim=1)
    minimum = torch.stack([six[:, 1], ((words[:, 2] >> 4) & _LOW_4) | upper[:, 1]], dim=1)
    parts = out.view(-1, 32)
    parts.mul_(scale.view(torch.uint8).float().mul_(half(blocks, 0)).view(-1, 1))
    parts.sub_(minimum.view(torch.uint8).float().mul_(half(blocks, 2)).view(-1, 1))


def _scales_of_q3(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [N, 16] of [N, 12] bytes: four low bits of each in eight bytes, two high in four."""
    words = packed.contiguous().view(torch.int32)
    firsts, rest = words[:, :2], words[:, 2:]
    low = torch.cat([firsts & _LOW_4, (firsts >> 4) & _LOW_4], dim=1)
    high = torch.cat([rest, rest >> 2, rest >> 4, rest >> 6], dim=1)
    return low.bitwise_or_((high & _LOW_2) << 4).view(torch.uint8)
