"""``PackedParameter4bit``: one kind of entries of a layer's 4-bit matrices, flat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch

from loadkit.errors import WeightLoadError
from loadkit.tracing.regions import copy_region
from loadkit_bitsandbytes.piece import Cutout
from loadkit_layers.parameter import BaseParameter
from loadkit_layers.sharding import Shard, misfit

__all__ = ["PackedParameter4bit"]


class PackedParameter4bit(BaseParameter):
    """[entries]: codes, scales or tables of every shard, one shard after another.

    Args:
        data: the storage.
        cuts: what each shard takes of its tensor, by the shard's index.
        **base: as ``BaseParameter``.
    """

    cuts: tuple[Cutout, ...]

    def __init__(self, data: torch.Tensor, *, cuts: Sequence[Cutout], **base: Any) -> None:
        super().__init__(data, **base)
        self.cuts = tuple(cuts)

    def load_column_parallel_weight(self, loaded_weight: torch.Tensor) -> None:
        self._take(0, loaded_weight)

    def load_row_parallel_weight(self, loaded_weight: torch.Tensor) -> None:
        self._take(0, loaded_weight)

    def load_merged_column_weight(self, loaded_weight: torch.Tensor, *, shard: Shard) -> None:
        self._take(shard.index, loaded_weight)

    def split_fused(
        self, loaded_weight: torch.Tensor, shards: Sequence[Shard]
    ) -> Iterator[tuple[Shard, torch.Tensor]]:
        yield from ((shard, loaded_weight) for shard in shards)  # each knows its place in it

    def _take(self, index: int, loaded: torch.Tensor) -> None:
        """Copy what a shard takes of its tensor into its place."""
        cut = self.cuts[index]
        if loaded.dtype != self.dtype:
            raise WeightLoadError(
                f"parameter {self.parameter_name} holds {self.dtype} of a 4-bit matrix; what was "
                f"given to it is {loaded.dtype}",
                parameter=self.parameter_name or None,
                hint="load the checkpoint that this model was planned for",
            )
        if loaded.numel() != prod(cut.source):
            raise misfit(self, loaded, f"{prod(cut.source)} entries", what=f"part {index}")
        (row, column), (rows, columns) = cut.first, cut.size
        if cut.source[0] == 1:  # one run
            flat = loaded if loaded.dim() == 1 else loaded.view(-1)
            copy_region(self, flat, [(0, cut.at, columns, column)])
            return
        place = self.data.narrow(0, cut.at, cut.count).view(cut.size)
        copy_region(place, loaded.view(cut.source), [(0, 0, rows, row), (1, 0, columns, column)])
