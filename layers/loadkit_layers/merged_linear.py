"""Several column-parallel layers in one parameter, q, k and v among them.

H query heads, G key/value heads, R tp size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from loadkit.config import ParallelConfig
from loadkit.errors import WeightLoadError
from loadkit.tracing.regions import copies_regions
from loadkit_layers.linear import LOOKED_AT, ColumnParallelLinear
from loadkit_layers.parameter import BaseParameter
from loadkit_layers.sharding import Shard, require_divisible, split_shards

__all__ = ["MergedColumnParallelLinear", "QKVParallelLinear"]

ShardId = int | str | tuple[int | str, ...] | None


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Column-parallel layers with one input, fused: each rank holds its part of each of them.

    Args:
        input_size: K.
        output_sizes: N of each layer.
        bias: add a bias.
        parallel: this rank's place.
        **base: as ``ColumnParallelLinear``.

    Raises:
        ModelError: ``TP_INDIVISIBLE``.
    """

    loader_looks_at = LOOKED_AT

    def __init__(
        self,
        input_size: int,
        output_sizes: Sequence[int],
        bias: bool = True,
        *,
        parallel: ParallelConfig,
        **base: Any,
    ) -> None:
        self.output_sizes = list(output_sizes)
        tp_size = 1 if base.get("disable_tp") else parallel.tp_size
        shards = split_shards(self.output_sizes, tp_size, prefix=base.get("prefix", ""))
        super().__init__(
            input_size, sum(self.output_sizes), bias, parallel=parallel, shards=shards, **base
        )

    @copies_regions
    def weight_loader(
        self,
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        shard_id: ShardId = None,
    ) -> None:
        """Copy this rank's part of a checkpoint tensor into the place of its shard.

        Args:
            param: one of this layer's parameters.
            loaded_weight: the checkpoint tensor.
            shard_id: which layer it is; a tuple: these, fused on disk in this order; None: all.

        Raises:
            WeightLoadError: no such shard, or the shapes do not fit; the parameter is untouched.
        """
        target = self.sharded(param)
        if isinstance(shard_id, int | str):
            self.load_shard(target, loaded_weight, self.find_shard(shard_id))
            return
        shards = self.output_shards
        if shard_id is not None:
            shards = tuple(self.find_shard(one) for one in shard_id)
        for shard, part in target.split_fused(loaded_weight, shards):
            self.load_shard(target, part, shard)

    def load_shard(self, param: BaseParameter, loaded_weight: torch.Tensor, shard: Shard) -> None:
        """The parameter's own way to take one shard."""
        param.load_merged_column_weight(loaded_weight, shard=shard)

    def find_shard(self, shard_id: int | str) -> Shard:
        """The shard a weight loader was called with."""
        for shard in self.output_shards:
            if shard.id == shard_id:
                return shard
        ids = [shard.id for shard in self.output_shards]
        raise WeightLoadError(
            f"layer {self.prefix} has no shard {shard_id!r}; it has {ids}",
            detail={"shard_id": shard_id, "shard_ids": ids},
        )


class QKVParallelLinear(MergedColumnParallelLinear):
    """The query, key and value projections in one parameter, cut by heads.

    With more ranks than key/value heads, neighbouring ranks hold the same head.

    Args:
        hidden_size: K.
        head_size: features of a query or key head.
        total_num_heads: H, over all ranks.
        total_num_kv_heads: G, over all ranks; None: H.
        bias: add a bias.
        parallel: this rank's place.
        v_head_size: features of a value head; None: ``head_size``.
        **base: as ``ColumnParallelLinear``.

    Raises:
        ModelError: ``TP_INDIVISIBLE``; R has to divide H, and of R and G one the other.
    """

    loader_looks_at = LOOKED_AT

    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        total_num_heads: int,
        total_num_kv_heads: int | None = None,
        bias: bool = True,
        *,
        parallel: ParallelConfig,
        v_head_size: int | None = None,
        **base: Any,
    ) -> None:
        H, G = total_num_heads, total_num_kv_heads or total_num_heads
        R = 1 if base.get("disable_tp") else parallel.tp_size
        require_divisible(
            base.get("prefix", ""),
            R,
            [H, G],
            unit="query and key/value heads",
            legal=lambda tp: H % tp == 0 and (G % tp == 0 or tp % G == 0),
        )
        self.hidden_size, self.head_size = hidden_size, head_size
        self.v_head_size = head_size if v_head_size is None else v_head_size
        self.total_num_heads, self.total_num_kv_heads = H, G
        self.num_heads, self.num_kv_heads = H // R, max(G // R, 1)
        self.num_kv_head_replicas = max(R // G, 1)
        q, k = self.num_heads * head_size, self.num_kv_heads * head_size
        v = self.num_kv_heads * self.v_head_size
        shards = (
            Shard("q", 0, 0, q),
            Shard("k", 1, q, k, self.num_kv_head_replicas),
            Shard("v", 2, q + k, v, self.num_kv_head_replicas),
        )
        self.output_sizes = [shard.size * R for shard in shards]
        ColumnParallelLinear.__init__(
            self,
            hidden_size,
            sum(self.output_sizes),
            bias,
            parallel=parallel,
            shards=shards,
            **base,
        )

    def load_shard(self, param: BaseParameter, loaded_weight: torch.Tensor, shard: Shard) -> None:
        param.load_qkv_weight(loaded_weight, shard=shard)
