"""Matrices that no layer of a model takes packed: their numbers, made when they are read."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from loadkit_bitsandbytes.arithmetic import Quantised, dequantise
from loadkit_bitsandbytes.eight_bit import dequantise_rows
from loadkit_bitsandbytes.piece import Piece
from loadkit_bitsandbytes.scheme import DTYPES, Scheme
from loadkit_bitsandbytes.survey import StoredMatrix

__all__ = ["decoded"]


@torch.library.custom_op("loadkit_bitsandbytes::dequantise", mutates_args=())
def _dequantise(
    weight: torch.Tensor,
    absmax: torch.Tensor,
    quant_map: torch.Tensor | None,
    nested_absmax: torch.Tensor | None,
    nested_quant_map: torch.Tensor | None,
    nested_offset: float,
    kind: str,
    sizes: list[int],
    dtype: str,
) -> torch.Tensor:
    """A matrix's numbers; ``sizes``: its rows and columns, blocksize, nested blocksize."""
    N, K, blocksize, nested = sizes
    scheme = Scheme(kind, blocksize, nested, dtype, own_code=quant_map is not None)
    offset = torch.tensor(nested_offset, dtype=torch.float32, device=weight.device)
    parts = Quantised(weight, absmax, quant_map, nested_absmax, nested_quant_map, offset)
    return dequantise(Piece.whole(scheme, N, K), parts)


@_dequantise.register_fake
def _(
    weight: torch.Tensor,
    absmax: torch.Tensor,
    quant_map: torch.Tensor | None,
    nested_absmax: torch.Tensor | None,
    nested_quant_map: torch.Tensor | None,
    nested_offset: float,
    kind: str,
    sizes: list[int],
    dtype: str,
) -> torch.Tensor:
    return weight.new_empty(sizes[:2], dtype=DTYPES[dtype])


def decoded(matrix: StoredMatrix, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The numbers of a matrix [N, K], float32 or what was quantised; lazy if ``parts`` are.

    Args:
        matrix: which.
        parts: its tensors by role; ``weight`` flat bytes, or int8.
    """
    if matrix.state is None:
        return dequantise_rows(parts["weight"], parts["SCB"])
    scheme = matrix.state.scheme
    made: torch.Tensor = torch.ops.loadkit_bitsandbytes.dequantise.default(
        parts["weight"],
        parts["absmax"],
        parts["quant_map"] if scheme.own_code else None,
        parts.get("nested_absmax"),
        parts.get("nested_quant_map"),
        matrix.state.offset,
        scheme.kind,
        [*matrix.shape, scheme.blocksize, scheme.nested],
        scheme.dtype,
    )
    return made
