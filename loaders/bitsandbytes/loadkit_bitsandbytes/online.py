"""Linear layers that are quantised to 4 bits once their weight is loaded: after the tp slice.

A module at a time is read, quantised and done with, so a load takes the quantised model and one
module of plain numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from loadkit.errors import ModelError
from loadkit_bitsandbytes.arithmetic import Quantised, joined, quantise
from loadkit_bitsandbytes.four_bit import FourBitMethod
from loadkit_bitsandbytes.options import QuantOptions
from loadkit_bitsandbytes.piece import Piece
from loadkit_bitsandbytes.pieces_of import shards_of
from loadkit_bitsandbytes.scheme import Scheme
from loadkit_layers.parameter import BaseParameter
from loadkit_layers.unquantized import UnquantizedLinearMethod

__all__ = ["OnlineFourBitMethod", "other_bytes", "quantised_bytes", "register", "stacked"]


def quantised_bytes(pieces: Sequence[Piece]) -> int:
    """What pieces take once they are quantised."""
    total = 0
    for piece in pieces:
        nested = piece.nested_span[1]
        total += piece.nbytes + piece.blocks * (1 if nested else 4)
        total += 4 * (nested + 256 + 1) if nested else 0
    return total


def other_bytes(layer: nn.Module, *names: str) -> int:
    """Bytes of a layer's own parameters, without those of these names."""
    return sum(
        param.numel() * param.itemsize
        for name, param in layer.named_parameters(recurse=False)
        if name not in names
    )


def stacked(made: Sequence[Quantised]) -> dict[str, torch.Tensor]:
    """Several matrices' parts as flat tensors by role."""
    found = {
        "weight": joined([one.weight for one in made]),
        "absmax": joined([one.absmax for one in made]),
    }
    if made[0].nested_absmax is not None:
        for role in ("nested_absmax", "nested_quant_map", "nested_offset"):
            found[role] = joined([getattr(one, role).view(-1) for one in made])
    return found


def register(
    layer: nn.Module, stem: str, tensors: Mapping[str, torch.Tensor], like: torch.Tensor
) -> None:
    """Put flat tensors in the place of a layer's parameter ``stem``.

    ``like`` is the parameter that they were made of: they know the rank and the name it knew.
    """
    rank, size = getattr(like, "tp_rank", 0), getattr(like, "tp_size", 1)
    path = str(getattr(like, "parameter_name", ""))
    layer._parameters.pop(stem, None)
    for role, tensor in tensors.items():
        more = "" if role == "weight" else f"_{role}"
        name = path + more
        param = BaseParameter(tensor, tp_rank=rank, tp_size=size, parameter_name=name)
        layer.register_parameter(stem + more, param)


class OnlineFourBitMethod(FourBitMethod):
    """A weight [N, K] in plain numbers, that becomes 4-bit codes and their scales.

    Args:
        options: how.
        scheme: how, in place of what the options say.
    """

    uses_meta_device: ClassVar[bool] = True
    layout_version: ClassVar[int | None] = 1

    def __init__(self, options: QuantOptions, scheme: Scheme | None = None) -> None:
        super().__init__(options)
        self._scheme = scheme

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: Sequence[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        K = input_size_per_partition
        shards = shards_of(layer, K, input_size)
        if shards is None:
            raise ModelError(f"{type(layer).__name__} is no layer that is quantised")
        scheme = self.options.scheme(params_dtype)
        if self._scheme is not None:
            scheme = replace(self._scheme, dtype=scheme.dtype, own_code=False)
        pieces = [Piece.whole(scheme, shard.size, K) for shard in shards.shards]
        layer.bitsandbytes_pieces = tuple(pieces)  # type: ignore[assignment]
        layer.bitsandbytes_padding = shards.padding  # type: ignore[assignment]
        UnquantizedLinearMethod().create_weights(
            layer, K, output_partition_sizes, input_size, output_size, params_dtype,
            **extra_weight_attrs,
        )  # fmt: skip

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Quantise each shard by itself, as if it were a layer of its own."""
        weight = layer.get_parameter("weight")
        made: list[Quantised] = []
        at = 0
        for piece in self.pieces(layer):
            made.append(quantise(weight.data.narrow(0, at, piece.rows), piece.scheme))
            at += piece.rows
        register(layer, "weight", stacked(made), weight)

    def bytes_after_loading(self, layer: nn.Module) -> int:
        return quantised_bytes(self.pieces(layer)) + other_bytes(layer, "weight")
