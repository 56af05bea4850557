"""Linear layers whose weights are quantised in the checkpoint. N outputs, K inputs, R tp size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from loadkit_bitsandbytes.eight_bit import StoredEightBitMethod
from loadkit_bitsandbytes.four_bit import FourBitMethod
from loadkit_bitsandbytes.misaligned import Misaligned, mark
from loadkit_bitsandbytes.online import OnlineFourBitMethod
from loadkit_bitsandbytes.piece import Piece
from loadkit_bitsandbytes.pieces_of import LayerShards, create_packed, pieces_of, shards_of
from loadkit_bitsandbytes.survey import StoredMatrix
from loadkit_layers.unquantized import UnquantizedLinearMethod

if TYPE_CHECKING:
    from loadkit.quantization import LinearMethodBase
    from loadkit_bitsandbytes.config import BitsAndBytesConfig

__all__ = ["StoredLinearMethod"]


class StoredLinearMethod(FourBitMethod):
    """Codes and scales as the checkpoint has them, cut on borders of blocks.

    A layer whose matrices are int8 becomes one of those; a layer that is not quantised in the
    checkpoint, or whose sizes are not the checkpoint's, a plain one.
    """

    def __init__(self, config: BitsAndBytesConfig, prefix: str) -> None:
        super().__init__(config.options)
        self.config, self.prefix = config, prefix

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
        shards = shards_of(layer, input_size_per_partition, input_size)
        found = self._matrices(shards)
        instead: LinearMethodBase = UnquantizedLinearMethod()
        if shards is not None and found is not None:
            if all(matrix.state is None for matrix in found):
                instead = StoredEightBitMethod(self.options, [matrix.name for matrix in found])
            else:
                pieces = pieces_of(shards, found) or []
                chosen = self._instead(layer, pieces)
                if chosen is None:
                    self._create(layer, pieces, shards.padding, extra_weight_attrs)
                    return
                instead = chosen
        layer.quant_method = instead  # type: ignore[assignment]  # a layer's own attribute
        instead.create_weights(
            layer, input_size_per_partition, output_partition_sizes, input_size, output_size,
            params_dtype, **extra_weight_attrs,
        )  # fmt: skip

    def _matrices(self, shards: LayerShards | None) -> list[StoredMatrix] | None:
        table = self.config.table
        if shards is None or table is None:
            return None
        fusions = self.config.packed_modules_mapping
        return table.shards(self.prefix, shards.shards, fusions)

    def _instead(self, layer: nn.Module, pieces: Sequence[Piece]) -> LinearMethodBase | None:
        """The method of a layer that cannot hold its pieces; None: it can."""
        if not pieces or len({bool(piece.scheme.nested) for piece in pieces}) > 1:
            return UnquantizedLinearMethod()
        bad = [piece for piece in pieces if not piece.fits]
        if not bad:
            return None
        if self.config.misaligned == "requantise":
            return OnlineFourBitMethod(self.options, pieces[0].scheme)
        if self.config.misaligned == "error":
            size = int(getattr(layer, "tp_size", 1))
            mark(layer, [Misaligned.of(piece, f"{self.prefix}.weight", size) for piece in bad])
        return UnquantizedLinearMethod()

    def _create(
        self, layer: nn.Module, pieces: Sequence[Piece], padding: int, attrs: dict[str, Any]
    ) -> None:
        for role, param in create_packed(pieces, attrs):
            name = "weight" if role == "weight" else f"weight_{role}"
            layer.register_parameter(name, param)
        if pieces[0].scheme.nested:
            offsets = torch.tensor([piece.offset for piece in pieces], dtype=torch.float32)
            layer.register_buffer("weight_nested_offset", offsets)
        layer.bitsandbytes_pieces = tuple(pieces)  # type: ignore[assignment]
        layer.bitsandbytes_padding = padding  # type: ignore[assignment]
