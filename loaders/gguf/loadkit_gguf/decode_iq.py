"""IQ types: rows of a code book, with signs, or a code of 16 levels.

N super-blocks (of 256, IQ4_NL: blocks of 32).

Source: ``dequantize_row_iq*`` of ``ggml-quants.c``.
"""

from __future__ import annotations

import base64
from functools import cache

import torch

from loadkit_gguf.bit_tables import bits_as_bytes, code_pairs
from loadkit_gguf.decode_basic import half
from loadkit_gguf.grids import GRIDS

__all__ = ["iq1_m", "iq1_s", "iq2_s", "iq2_xs", "iq2_xxs", "iq3_s", "iq3_xxs", "iq4_nl", "iq4_xs"]

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


# -- tables ----------------------------------------------------------------------------------------


def _levels(name: str) -> torch.Tensor:
    """A grid's numbers, int8 [rows, width]."""
    grid = GRIDS[name]
    data = torch.frombuffer(bytearray(base64.b85decode(grid.data)), dtype=torch.uint8)
    bits = 2 if grid.width == 8 else 4
    index = (data.unsqueeze(1) >> torch.arange(0, 8, bits, dtype=torch.uint8)) & (2**bits - 1)
    table = torch.tensor(grid.levels, dtype=torch.int8)
    return table[index.view(-1).long()].view(grid.rows, grid.width)


@cache
def _grid(name: str) -> torch.Tensor:
    """A grid with each row in one integer: int64 [rows] of 8 numbers, int32 [rows] of 4."""
    rows = _levels(name)
    return rows.view(torch.int64 if rows.shape[1] == 8 else torch.int32).view(-1)


@cache
def _shifted_grid() -> torch.Tensor:
    """int64 [4096]: rows of eight times (the number + 1/8), then of eight times (it - 1/8)."""
    eight = _levels("iq1") * 8
    return torch.cat([eight + 1, eight - 1]).view(torch.int64).view(-1)


@cache
def _even_signs() -> torch.Tensor:
    """int64 [128]: eight bytes, 0xFF for minus; the eighth sign makes their number even."""
    seven = torch.arange(128)
    parity = ((seven.unsqueeze(1) >> torch.arange(7)) & 1).sum(1) & 1
    return bits_as_bytes(0, 0xFF)[seven | parity << 7]


# -- parts -----------------------------------------------------------------------------------------


def _signed(rows: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """int8 [N, 256]: the rows' numbers, negated where a sign byte is 0xFF."""
    flip = signs.reshape(-1).view(torch.int8)
    return rows.view(torch.int8).bitwise_xor_(flip).sub_(flip).view(-1, 256)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [N, 2 * bytes]: low half, high half of each byte in turn."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).view(packed.shape[0], -1)


def _unsigned(packed: torch.Tensor) -> torch.Tensor:
    """int32 of little-endian 16-bit numbers in [N, 2 * count] bytes."""
    return packed.contiguous().view(torch.int16).int() & 0xFFFF


def _shifts(*amounts: int) -> torch.Tensor:
    return torch.tensor(amounts, dtype=torch.int32)


def _scale_parts(out: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> None:
    """``out`` is ``values`` times ``scale`` [N, parts], each part of a block by its own."""
    count, parts = scale.shape
    out.copy_(values.view(out.shape))
    out.view(count, parts, -1).mul_(scale.unsqueeze(-1))


# -- two bits and a little -------------------------------------------------------------------------


def iq2_xxs(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """``d``, eight times: four grid rows, and a word of four signs and a scale."""
    words = blocks[:, 2:].contiguous().view(torch.int32).view(-1, 8, 2)
    rows = blocks[:, 2:].view(-1, 8, 8)[:, :, :4].int().reshape(-1)
    values = _grid("iq2_xxs").index_select(0, rows)
    word = words[:, :, 1]
    signs = (word.unsqueeze(-1) >> _shifts(0, 7, 14, 21)) & 127
    scale = ((word >> 28) & 15).float().add_(0.5).mul_(half(blocks, 0)).mul_(0.25)
    _scale_parts(out, _signed(values, _even_signs().index_select(0, signs.view(-1))), scale)


def iq2_xs(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """``d``, 32 times a grid row and its signs in 16 bits, 16 scales."""
    codes = _unsigned(blocks[:, 2:66]).view(-1)
    values = _grid("iq2_xs").index_select(0, codes & 511)
    scale = _nibbles(blocks[:, 66:74]).float().add_(0.5).mul_(half(blocks, 0)).mul_(0.25)
    _scale_parts(out, _signed(values, _even_signs().index_select(0, codes >> 9)), scale)


def iq2_s(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """``d``, 32 low bytes of rows, 32 bytes of signs, 8 bytes of high bits, 16 scales."""
    high = (blocks[:, 66:74].int().unsqueeze(-1) >> _shifts(0, 2, 4, 6)) & 3
    rows = blocks[:, 2:34].int() | (high << 8).view(-1, 32)
    values = _grid("iq2_s").index_select(0, rows.view(-1))
    signs = bits_as_bytes(0, 0xFF).index_select(0, blocks[:, 34:66].int().view(-1))
    scale = _nibbles(blocks[:, 74:82]).float().add_(0.5).mul_(half(blocks, 0)).mul_(0.25)
    _scale_parts(out, _signed(values, signs), scale)


# -- three bits and a little -----------------------------------------------------------------------


def iq3_xxs(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """``d``, 64 grid rows of four, eight words of four signs and a scale."""
    values = _grid("iq3_xxs").index_select(0, blocks[:, 2:66].int().view(-1))
    word = blocks[:, 66:98].contiguous().view(torch.int32)
    signs = (word.unsqueeze(-1) >> _shifts(0, 7, 14, 21)) & 127
    scale = ((word >> 28) & 15).float().add_(0.5).mul_(half(blocks, 0)).mul_(0.5)
    _scale_parts(out, _signed(values, _even_signs().index_select(0, signs.view(-1))), scale)


def iq3_s(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """``d``, 64 low bytes of rows of four, 8 bytes of high bits, 32 of signs, 8 scales."""
    high = (blocks[:, 66:74].int().unsqueeze(-1) >> _shifts(*range(8))) & 1
    rows = blocks[:, 2:66].int() | (high << 8).view(-1, 64)
    values = _grid("iq3_s").index_select(0, rows.view(-1))
    signs = bits_as_bytes(0, 0xFF).index_select(0, blocks[:, 74:106].int().view(-1))
    scale = _nibbles(blocks[:, 106:110]).float().mul_(2).add_(1).mul_(half(blocks, 0))
    _scale_parts(out, _signed(values, signs), scale)


# -- one bit and a little --------------------------------------------------------------------------


def iq1_s(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """``d``, 32 low bytes of rows, eight words: high bits of four rows, a scale, the shift."""
    word = _unsigned(blocks[:, 34:50])
    high = (word.unsqueeze(-1) >> _shifts(0, 3, 6, 9)) & 7
    shift = (word >> 15).unsqueeze(-1)
    rows = blocks[:, 2:34].int() | ((high << 8) | (shift << 11)).view(-1, 32)
    values = _shifted_grid().index_select(0, rows.view(-1)).view(torch.int8)
    scale = ((word >> 12) & 7).float().mul_(2).add_(1).mul_(half(blocks, 0)).mul_(0.125)
    _scale_parts(out, values, scale)


def iq1_m(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """32 low bytes of rows, 16 of high bits and shifts, 16 scales and ``d`` in four words."""
    high = _nibbles(blocks[:, 32:48]).int()  # three bits of the row, one of the shift
    rows = blocks[:, :32].int() | (high << 8)
    values = _shifted_grid().index_select(0, rows.view(-1)).view(torch.int8)
    words = _unsigned(blocks[:, 48:56])
    bits = (words >> 12) << _shifts(0, 4, 8, 12)
    super_scale = bits.sum(1, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    parts = ((words.unsqueeze(-1) >> _shifts(0, 3, 6, 9)) & 7).view(-1, 16)
    scale = parts.float().mul_(2).add_(1).mul_(super_scale.unsqueeze(-1)).mul_(0.125)
    _scale_parts(out, values, scale)


# -- four bits, 16 levels --------------------------------------------------------------------------


def coded(packed: torch.Tensor, codes: tuple[int, ...], width: int) -> torch.Tensor:
    """int8 [N, parts, 2, width]: the codes of low halves, then of high halves, part by part.

    Args:
        packed: uint8 [N, parts * width], ``width`` (even) bytes to a part.
        codes: the 16 numbers that four bits stand for.
        width: bytes of a part.
    """
    pairs = _unsigned(packed).view(-1)
    made = torch.empty(packed.shape[0], packed.shape[1] // width, 2, width // 2, dtype=torch.int16)
    for side, table in enumerate(code_pairs(codes)):
        made[:, :, side] = table.index_select(0, pairs).view(made[:, :, side].shape)
    return made.view(torch.int8)


def iq4_nl(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """``d``, 16 bytes of two codes: ``d * level``."""
    out.copy_(coded(blocks[:, 2:], _IQ4, 16).view(out.shape)).mul_(half(blocks, 0))


def iq4_xs(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """``d``, two high bits of eight scales, four low ones, 128 bytes of two codes."""
    high = (_unsigned(blocks[:, 2:4]) >> _shifts(*range(0, 16, 2))) & 3
    scale = (_nibbles(blocks[:, 4:8]).int() | (high << 4)).sub_(32).float().mul_(half(blocks, 0))
    _scale_parts(out, coded(blocks[:, 8:], _IQ4, 16), scale)
