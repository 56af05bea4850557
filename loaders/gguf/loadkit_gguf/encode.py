"""Blocks from numbers: what ``decode_basic`` reads, written. n blocks of 32 numbers.

Every function takes float32 ``[n, 32]`` and gives uint8 ``[n, bytes of a block]``, the bytes that
ggml's reference code makes.

Source: the block layouts of ``ggml-common.h``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from loadkit.readers.threads import default_threads, run_tasks
from loadkit_gguf.encoding import PIECE, one_thread_per_operation

__all__ = ["ENCODERS", "Encoder", "encode_rows"]

Encoder = Callable[[torch.Tensor], torch.Tensor]
BLOCK = 32
_PARALLEL = 1 << 20  # elements from which threads are worth starting
_MAX_THREADS = 8


def encode_rows(kind: str, rows: torch.Tensor) -> torch.Tensor:
    """Rows of numbers [..., K], whole blocks, as rows of bytes, uint8 [..., bytes of a row]."""
    encode = ENCODERS[kind]
    blocks = rows.reshape(-1, BLOCK)
    out = torch.empty(len(blocks), encode(torch.zeros(1, BLOCK)).shape[1], dtype=torch.uint8)
    step = PIECE // BLOCK

    def piece(start: int) -> int:
        made = encode(blocks[start : start + step].float())
        out[start : start + step] = made
        return made.numel()

    with torch.no_grad(), one_thread_per_operation():
        threads = 1 if rows.numel() < _PARALLEL else default_threads(0, _MAX_THREADS)
        run_tasks((partial(piece, at) for at in range(0, len(blocks), step)), threads)
    return out.reshape(*rows.shape[:-1], rows.shape[-1] // BLOCK * out.shape[1])


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    """1 / scale, 0 where that is 0."""
    return torch.where(scale == 0, torch.zeros_like(scale), 1 / scale)


def _half(value: torch.Tensor) -> torch.Tensor:
    """float32 [n, 1] as the two bytes of a float16, [n, 2]."""
    return value.half().contiguous().view(torch.uint8)


def _nibbles(low4: torch.Tensor) -> torch.Tensor:
    """Numbers below 16 [n, 32] in 16 bytes: the first half in the low bits, the second above."""
    first, second = low4.chunk(2, dim=-1)
    return first | (second << 4)


def _signed_scale(blocks: torch.Tensor, steps: int) -> torch.Tensor:
    """The scale [n, 1] at which the number farthest from 0 is ``-steps``."""
    at = blocks.abs().argmax(dim=-1, keepdim=True)
    return blocks.gather(-1, at) / -steps


def _levels(scaled: torch.Tensor, highest: int) -> torch.Tensor:
    """Numbers with their rounding added, cut to levels 0 .. highest."""
    return scaled.trunc().clamp(0, highest).to(torch.uint8)


def _range(blocks: torch.Tensor, highest: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scale, least number and levels of blocks whose levels are 0 .. highest."""
    least = blocks.amin(dim=-1, keepdim=True)
    scale = (blocks.amax(dim=-1, keepdim=True) - least) / highest
    return scale, least, _levels((blocks - least) * _inverse(scale) + 0.5, highest)


def _fifth_bits(levels: torch.Tensor) -> torch.Tensor:
    """Bit 4 of 32 numbers [n, 32] in four bytes [n, 4], the first number in the lowest bit."""
    bits = (levels >> 4).view(-1, 4, 8)
    weights = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8)
    return (bits * weights).sum(-1, dtype=torch.uint8)


def q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """A scale, 32 bytes."""
    scale = blocks.abs().amax(dim=-1, keepdim=True) / 127
    scaled = blocks * _inverse(scale)
    whole = scaled.abs().floor()
    rounded = whole + (2 * (scaled.abs() - whole)).floor()  # halves go away from 0
    levels = (scaled.sign() * rounded).to(torch.int8)
    return torch.cat([_half(scale), levels.view(torch.uint8)], dim=-1)


def q4_0(blocks: torch.Tensor) -> torch.Tensor:
    """A scale, 32 times four bits."""
    scale = _signed_scale(blocks, 8)
    return torch.cat([_half(scale), _nibbles(_levels(blocks * _inverse(scale) + 8.5, 15))], dim=-1)


def q4_1(blocks: torch.Tensor) -> torch.Tensor:
    """A scale, the least number, 32 times four bits."""
    scale, least, levels = _range(blocks, 15)
    return torch.cat([_half(scale), _half(least), _nibbles(levels)], dim=-1)


def q5_0(blocks: torch.Tensor) -> torch.Tensor:
    """A scale, the fifth bits, 32 times four bits."""
    scale = _signed_scale(blocks, 16)
    levels = _levels(blocks * _inverse(scale) + 16.5, 31)
    return torch.cat([_half(scale), _fifth_bits(levels), _nibbles(levels & 15)], dim=-1)


def q5_1(blocks: torch.Tensor) -> torch.Tensor:
    """A scale, the least number, the fifth bits, 32 times four bits."""
    scale, least, levels = _range(blocks, 31)
    parts = [_half(scale), _half(least), _fifth_bits(levels), _nibbles(levels & 15)]
    return torch.cat(parts, dim=-1)


ENCODERS: dict[str, Encoder] = {
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q8_0": q8_0,
}
