"""Numbers from 4-bit codes and back, by the library's own operators.

N rows, K columns. What dequantising gives is what ``bitsandbytes.functional.dequantize_4bit`` gives
for the matrix that a piece is cut from, bit for bit. Only a code that a file brings itself, which
the library's kernels do not look at, is computed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from loadkit_bitsandbytes.library import functional
from loadkit_bitsandbytes.parts import in_parts
from loadkit_bitsandbytes.piece import Piece
from loadkit_bitsandbytes.scheme import NESTED_BLOCKSIZE, Scheme

__all__ = ["Quantised", "dequantise", "joined", "multiply", "plain_scales", "quantise"]

_STEP = 1 << 17  # elements that are quantised at a time


class Quantised(NamedTuple):
    """A matrix in 4 bits. The last four are None where they are not needed.

    Attributes:
        weight: uint8 [bytes], two codes each, the first one high.
        absmax: float32 [blocks], or uint8 [blocks] with nested scales.
        quant_map: float32 [16], a code of the file's own.
        nested_absmax: float32 [nested blocks].
        nested_quant_map: float32 [256].
        nested_offset: float32 [].
    """

    weight: torch.Tensor
    absmax: torch.Tensor
    quant_map: torch.Tensor | None = None
    nested_absmax: torch.Tensor | None = None
    nested_quant_map: torch.Tensor | None = None
    nested_offset: torch.Tensor | None = None


def plain_scales(piece: Piece, parts: Quantised) -> torch.Tensor:
    """The scales of a piece's blocks: float32 [blocks]."""
    nested, table, offset = parts.nested_absmax, parts.nested_quant_map, parts.nested_offset
    if nested is None or table is None or offset is None:
        return parts.absmax
    if piece.in_order and piece.scheme.nested == NESTED_BLOCKSIZE:
        functional()
        scales: torch.Tensor = torch.ops.bitsandbytes.dequantize_blockwise.default(
            parts.absmax, nested, table, piece.scheme.nested, torch.float32
        )
        return scales + offset
    ids = piece.nested_ids(parts.absmax.device)
    return table[parts.absmax.long()] * nested[ids] + offset


def dequantise(piece: Piece, parts: Quantised, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A piece's numbers, [rows, columns].

    Args:
        piece: what ``parts`` hold.
        parts: its codes and scales.
        dtype: a float of 16 or 32 bits; None: of the numbers that were quantised.
    """
    shape, dtype = [piece.rows, piece.columns], dtype or piece.scheme.torch_dtype
    if not piece.numel:
        return torch.empty(shape, dtype=dtype, device=parts.weight.device)
    scales = plain_scales(piece, parts)
    if piece.scheme.own_code and parts.quant_map is not None:
        return _by_own_code(piece, parts, scales, dtype)
    functional()
    numbers: torch.Tensor = torch.ops.bitsandbytes.dequantize_4bit.default(
        parts.weight.view(-1, 1), scales, piece.scheme.blocksize, piece.scheme.kind, shape, dtype
    )
    return numbers


def _by_own_code(
    piece: Piece, parts: Quantised, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    table = parts.quant_map
    codes = torch.stack((parts.weight >> 4, parts.weight & 15), dim=-1).view(-1)[: piece.numel]
    numbers = (scales if table is None else table)[codes.long()]
    scale = scales.repeat_interleave(piece.scheme.blocksize)[: piece.numel]
    return (numbers * scale).to(dtype).view(piece.rows, piece.columns)


def multiply(
    x: torch.Tensor, piece: Piece, parts: Quantised, bias: torch.Tensor | None
) -> torch.Tensor:
    """``x [..., K]`` times a piece [N, K], transposed, plus ``bias``: [..., N] in x's dtype."""
    if not x.numel() or not piece.numel:
        return F.linear(x, x.new_zeros(piece.rows, piece.columns), bias)
    if piece.scheme.own_code:
        return F.linear(x, dequantise(piece, parts, x.dtype), bias)
    functional()
    gemm = torch.ops.bitsandbytes.gemm_4bit.default
    weight, shape = parts.weight.view(-1, 1), [piece.rows, piece.columns]
    size, kind = piece.scheme.blocksize, piece.scheme.kind
    nested = parts.nested_absmax
    if nested is not None and piece.in_order and piece.scheme.nested == NESTED_BLOCKSIZE:
        out: torch.Tensor = gemm(
            x, weight, shape, nested, size, kind, bias=bias,
            absmax_8bit=parts.absmax, absmax_code=parts.nested_quant_map,
            absmax_offset=parts.nested_offset,
        )  # fmt: skip
        return out
    made: torch.Tensor = gemm(x, weight, shape, plain_scales(piece, parts), size, kind, bias=bias)
    return made


def quantise(numbers: torch.Tensor, scheme: Scheme) -> Quantised:
    """A contiguous matrix in 4 bits, as ``bitsandbytes.functional.quantize_4bit`` makes it.

    Blocks do not depend on one another, so it is done a few of them at a time.
    """
    library = functional()
    flat = numbers.reshape(-1)
    weight = torch.empty((flat.numel() + 1) // 2, dtype=torch.uint8, device=flat.device)
    absmax = torch.empty(scheme.blocks(flat.numel()), dtype=torch.float32, device=flat.device)

    def some(start: int, end: int) -> None:
        codes, scales = torch.ops.bitsandbytes.quantize_4bit.default(
            flat[start:end], scheme.blocksize, scheme.kind, torch.uint8
        )
        weight[start // 2 :][: codes.numel()] = codes.view(-1)
        absmax[start // scheme.blocksize :][: scales.numel()] = scales

    in_parts(flat.numel(), _STEP, scheme.blocksize, flat.device, some)
    if not scheme.nested:
        return Quantised(weight, absmax)
    offset = absmax.mean()
    codes, state = library.quantize_blockwise(absmax - offset, blocksize=scheme.nested)
    return Quantised(weight, codes, None, state.absmax, state.code, offset)


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Flat tensors one after another; one alone is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])
