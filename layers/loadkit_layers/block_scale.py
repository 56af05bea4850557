"""One scale per block of a weight: blocks of block_n rows by block_k columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from loadkit.errors import ModelError
from loadkit_layers.parameter import ColumnParameter, RowParameter
from loadkit_layers.sharding import Shard, legal_tp_sizes, misfit

__all__ = ["BlockQuantScaleParameter"]


class BlockQuantScaleParameter(ColumnParameter, RowParameter):
    """Block scales [sum of ceil(rows / block_n) over the shards, ceil(K / block_k)].

    Each shard starts a block of its own, so every shard's rows are rounded up. Only the tail of a
    whole tensor may be a part of a block: a split over ranks that falls inside one is refused when
    the parameter is made, because then a rank's rows would not match its scales.

    Args:
        data: the storage, of the shape ``shape_for`` gives.
        block_n: rows of the weight per scale.
        block_k: columns of the weight per scale.
        shards: the layer's ``output_shards``.
        input_size_per_partition: the rank's input columns.
        input_size: all input columns.

    Raises:
        ModelError: ``TP_INDIVISIBLE``, naming layer, partition, block and the tp sizes that fit;
            or a ``data`` of another shape.
    """

    block_n: int
    block_k: int
    shards: tuple[Shard, ...]

    def __init__(
        self,
        data: torch.Tensor,
        *,
        block_n: int,
        block_k: int,
        shards: Sequence[Shard],
        input_size_per_partition: int,
        input_size: int,
        output_dim: int = 0,
        input_dim: int = 1,
        **base: Any,
    ) -> None:
        super().__init__(data, output_dim=output_dim, input_dim=input_dim, **base)
        self.block_n, self.block_k, self.shards = block_n, block_k, tuple(shards)
        rows, columns = self.shape_for(shards, input_size_per_partition, block_n, block_k)
        if (data.shape[output_dim], data.shape[input_dim]) != (rows, columns):
            raise ModelError(
                f"block scales {self.parameter_name} are {list(data.shape)}; "
                f"{rows} x {columns} blocks are needed",
                parameter=self.parameter_name or None,
            )
        for shard in self.shards:
            pieces = shard.pieces(self.tp_size)
            self._require_borders("output", shard.size, shard.size * pieces, block_n)
        self._require_borders("input", input_size_per_partition, input_size, block_k)

    @staticmethod
    def shape_for(
        shards: Sequence[Shard], input_size_per_partition: int, block_n: int, block_k: int
    ) -> tuple[int, int]:
        """Blocks along the output and along the input, for one rank."""
        rows = sum(-(-shard.size // block_n) for shard in shards)
        return rows, -(-input_size_per_partition // block_k)

    def _require_borders(self, side: str, part: int, full: int, block: int) -> None:
        """Refuse a part that is not the whole and does not end on a block border."""
        if part == full or part % block == 0:
            return
        legal = legal_tp_sizes(lambda tp: tp == 1 or full % (tp * block) == 0)
        raise ModelError(
            f"parameter {self.parameter_name}: tp {self.tp_size} gives each rank {part} of {full} "
            f"{side} features, which is not a multiple of the block of {block}",
            code="TP_INDIVISIBLE",
            parameter=self.parameter_name or None,
            detail={"legal": legal, "partition": part, "block": block, "tp_size": self.tp_size},
            hint="tp sizes that fit: " + ", ".join(str(tp) for tp in legal),
        )

    def output_units(self, rows: int) -> int:
        return -(-rows // self.block_n)

    def output_offset(self, shard: Shard) -> int:
        return sum(self.output_units(before.size) for before in self.shards[: shard.index])

    def split_fused(
        self, loaded_weight: torch.Tensor, shards: Sequence[Shard]
    ) -> Iterator[tuple[Shard, torch.Tensor]]:
        totals = [shard.size * shard.pieces(self.tp_size) for shard in shards]
        if any(total % self.block_n for total in totals[:-1]):
            raise misfit(
                self,
                loaded_weight,
                f"one tensor per shard: {totals} rows do not part on borders of {self.block_n}",
                what="fused shards",
            )
        yield from super().split_fused(loaded_weight, shards)
