"""What layers with 4-bit weights share: their forward, and their numbers. N outputs, K inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from loadkit.errors import ModelError
from loadkit.quantization import LinearMethodBase
from loadkit_bitsandbytes.arithmetic import Quantised, dequantise, multiply
from loadkit_bitsandbytes.options import QuantOptions
from loadkit_bitsandbytes.piece import Piece
from loadkit_bitsandbytes.pieces_of import merged, parts_of
from loadkit_bitsandbytes.quant_state import QuantState
from loadkit_bitsandbytes.saved import rows_of, state_tensor

__all__ = ["FourBitMethod", "multiply_all", "piece_tensors", "tensors_of"]

ROLES = ("weight", "absmax", "quant_map", "nested_absmax", "nested_quant_map", "nested_offset")


def tensors_of(layer: nn.Module, stem: str = "weight") -> dict[str, torch.Tensor]:
    """A layer's flat tensors by role."""
    found: dict[str, torch.Tensor] = {}
    for role in ROLES:
        name = stem if role == "weight" else f"{stem}_{role}"
        tensor: torch.Tensor | None = layer._parameters.get(name)
        if tensor is None:
            tensor = layer._buffers.get(name)
        if tensor is not None:
            found[role] = tensor.data
    return found


def multiply_all(
    x: torch.Tensor,
    pieces: Sequence[Piece],
    tensors: Mapping[str, torch.Tensor],
    bias: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """``x [..., K]`` times the rows of every piece: parts of [..., N] in order, in x's dtype."""
    parts: list[torch.Tensor] = []
    at = 0
    for piece, own in merged(pieces, tensors):
        some = None if bias is None else bias[at : at + piece.rows].to(x.dtype)
        parts.append(multiply(x, piece, own, some))
        at += piece.rows
    return parts


def piece_tensors(piece: Piece, own: Quantised) -> dict[str, torch.Tensor]:
    """A whole matrix as a checkpoint has it: suffix after the weight's name -> tensor."""
    code = own.quant_map
    found = {"": own.weight.view(-1, 1), ".absmax": own.absmax}
    offset = 0.0
    if own.nested_absmax is not None and own.nested_quant_map is not None:
        found[".nested_absmax"] = own.nested_absmax
        found[".nested_quant_map"] = own.nested_quant_map
    if own.nested_offset is not None and own.nested_offset.device.type != "meta":
        offset = float(own.nested_offset)
    state = QuantState(piece.scheme, (piece.rows, piece.columns), offset)
    return found | state_tensor(state, code)


class FourBitMethod(LinearMethodBase):
    """The side of a method that uses weights; ``stored`` and ``online`` make them.

    A layer has ``bitsandbytes_pieces``, one for each of its shards, and as many rows more as
    ``bitsandbytes_padding`` says.
    """

    def __init__(self, options: QuantOptions) -> None:
        self.options = options

    @staticmethod
    def pieces(layer: nn.Module) -> tuple[Piece, ...]:
        """What the layer's weight is made of.

        Raises:
            ModelError: the layer was made by another method.
        """
        found: Any = getattr(layer, "bitsandbytes_pieces", None)
        if not isinstance(found, tuple):
            raise ModelError(f"{type(layer).__name__} holds no 4-bit weight")
        return found

    @staticmethod
    def taken(layer: nn.Module) -> list[str]:
        """The checkpoint's matrices that the layer takes packed."""
        return [piece.tensor for piece in FourBitMethod.pieces(layer) if piece.tensor]

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        numbers = x.to(self.options.compute_dtype or x.dtype)
        parts = multiply_all(numbers, self.pieces(layer), tensors_of(layer), bias)
        padding = int(getattr(layer, "bitsandbytes_padding", 0))
        if padding:
            parts.append(numbers.new_zeros(*x.shape[:-1], padding))
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return out.to(x.dtype)

    def dequantised(self, layer: nn.Module, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A layer's weight as numbers, [N, K] of this rank, without padding.

        Args:
            layer: the layer.
            dtype: a float of 16 or 32 bits; None: of the numbers that were quantised.
        """
        found = parts_of(self.pieces(layer), tensors_of(layer))
        return torch.cat([dequantise(piece, own, dtype) for piece, own in found])

    def checkpoint_tensors(
        self, layer: nn.Module, name: str, shard_id: Any
    ) -> dict[str, torch.Tensor] | None:
        """What a checkpoint has of one shard: suffix -> tensor; none of what goes with others.

        Raises:
            ModelError: NOT_INVERTIBLE, the shard is a part of a matrix.
        """
        tensors = tensors_of(layer)
        if tensors["weight"].dtype != torch.uint8:
            return None  # not quantised yet
        if name == "bias":
            return {"": rows_of(layer, layer.get_parameter(name).data, shard_id)}
        if name != "weight":
            return {}
        pieces, shards = self.pieces(layer), getattr(layer, "output_shards", ())
        index = next((shard.index for shard in shards if shard.id == shard_id), 0)
        piece, own = list(parts_of(pieces, tensors))[index]
        if not piece.is_whole or (shard_id is None and len(pieces) > 1):
            raise ModelError(
                f"a shard of {type(layer).__name__} is a part of a 4-bit matrix: its scales "
                "cannot be told from the others'",
                code="NOT_INVERTIBLE",
                hint="save with save_format='sharded_state'",
            )
        return piece_tensors(piece, own)
