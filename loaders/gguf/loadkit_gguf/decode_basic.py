"""Types of small blocks with one scale: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q1_0.

N blocks. Operations run over whole blocks, scale bytes included: over long contiguous memory they
cost a fraction of what picking the bytes out first does.

Source: ``dequantize_row_*`` of ``ggml-quants.c``.
"""

from __future__ import annotations

import torch

from loadkit_gguf.bit_tables import bits_as_bytes

__all__ = ["half", "q1_0", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0"]


def half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at byte ``at`` of every block, as float32 [N, 1]."""
    return blocks.view(torch.float16)[:, at // 2 : at // 2 + 1].float()


def q4_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """``d``, 16 bytes of two: ``d * (q - 8)``; low halves first, then high ones."""
    scale = half(blocks, 0)
    low = (blocks & 15).float().sub_(8)
    torch.mul(low[:, 2:], scale, out=out[:, :16])
    high = (blocks >> 4).float().sub_(8)
    torch.mul(high[:, 2:], scale, out=out[:, 16:])


def q4_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """``d``, ``m``, 16 bytes of two: ``d * q + m``."""
    scale = half(blocks, 0)
    torch.mul((blocks & 15).float()[:, 4:], scale, out=out[:, :16])
    torch.mul((blocks >> 4).float()[:, 4:], scale, out=out[:, 16:])
    out.add_(half(blocks, 2))


def q5_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """``d``, 32 fifth bits, 16 bytes of two: ``d * (q - 16)``."""
    _five_bits(blocks, 2, bits_as_bytes(0xF0, 0), out)  # as int8: -16, or 0 where it is set
    out.mul_(half(blocks, 0))


def q5_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """``d``, ``m``, 32 fifth bits, 16 bytes of two: ``d * q + m``."""
    _five_bits(blocks, 4, bits_as_bytes(0, 0x10), out)
    out.mul_(half(blocks, 0)).add_(half(blocks, 2))


def _five_bits(blocks: torch.Tensor, at: int, table: torch.Tensor, out: torch.Tensor) -> None:
    """What ``table`` says of the fifth bits, plus the four bits of the 16 bytes after them."""
    fifth = table.index_select(0, blocks[:, at : at + 4].int().view(-1))
    out.copy_(fifth.view(torch.int8).view(out.shape))
    out[:, :16].add_((blocks & 15).float()[:, at + 4 :])
    out[:, 16:].add_((blocks >> 4).float()[:, at + 4 :])


def q8_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """``d``, 32 signed bytes: ``d * q``."""
    torch.mul(blocks.view(torch.int8).float()[:, 2:], half(blocks, 0), out=out)


def q1_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """``d``, 128 bits: ``d`` where the bit is set, else ``-d``."""
    signs = bits_as_bytes(0xFF, 1).index_select(0, blocks[:, 2:].int().view(-1))
    out.copy_(signs.view(torch.int8).view(out.shape)).mul_(half(blocks, 0))
