"""Block scales: sizes that are no multiples of the block, fused parts, splits on borders."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.ranks import only_views_and_writes, parallel_of, randn, unchanged_by
from loadkit.errors import ModelError, WeightLoadError
from loadkit_layers import BlockQuantScaleParameter, Shard
from loadkit_layers.sharding import split_shards

BLOCK = 8


def blocks(rows: int) -> int:
    return -(-rows // BLOCK)


def make(shards: Any, columns: int, all_columns: int, at: dict[str, int]) -> Any:
    shape = BlockQuantScaleParameter.shape_for(shards, columns, BLOCK, BLOCK)
    return BlockQuantScaleParameter(
        torch.full(shape, 99.0),
        block_n=BLOCK,
        block_k=BLOCK,
        shards=shards,
        input_size_per_partition=columns,
        input_size=all_columns,
        parameter_name="l.qkv.weight_scale_inv",
        **at,
    )


def dequantised(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Each element times the scale of its block."""
    spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return weight * spread[: weight.shape[0], : weight.shape[1]]


def test_sizes_that_are_no_multiple_of_the_block_round_up_shard_by_shard() -> None:
    rows = [36, 12, 12]  # 4.5, 1.5 and 1.5 blocks: rounding the offsets alone would overlap
    shards = split_shards(rows, 1, prefix="")
    param = make(shards, 20, 20, {"tp_rank": 0, "tp_size": 1})
    assert param.shape == (5 + 2 + 2, 3)
    scales = [randn(blocks(size), 3, seed=i) for i, size in enumerate(rows)]
    for shard, scale in zip(shards, scales, strict=True):
        with only_views_and_writes():
            param.load_merged_column_weight(scale, shard=shard)
    assert torch.equal(param, torch.cat(scales))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_TP_04_dequantised_rows_of_every_rank_are_those_of_the_whole(tp: int) -> None:
    rows, columns = [64, 32], 32
    weights = [randn(size, columns, seed=i) for i, size in enumerate(rows)]
    scales = [randn(blocks(size), blocks(columns), seed=9 + i) for i, size in enumerate(rows)]
    full = [dequantised(w, s) for w, s in zip(weights, scales, strict=True)]
    for fused in (False, True):
        for p in parallel_of(tp):
            shards = split_shards(rows, tp, prefix="")
            param = make(shards, columns, columns, {"tp_rank": p.tp_rank, "tp_size": tp})
            pieces: Any = zip(shards, scales, strict=True)
            if fused:
                pieces = param.split_fused(torch.cat(scales), shards)
            for shard, scale in pieces:
                param.load_merged_column_weight(scale, shard=shard)
            parts = param.split([blocks(shard.size) for shard in shards])
            for i, shard in enumerate(shards):
                own = slice(p.tp_rank * shard.size, (p.tp_rank + 1) * shard.size)
                assert torch.equal(dequantised(weights[i][own], parts[i]), full[i][own])


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_row_parallel_scales_join_along_the_input(tp: int) -> None:
    whole = randn(blocks(20), blocks(64))
    parts = []
    for p in parallel_of(tp):
        shards = [Shard(0, 0, 0, 20, replicas=tp)]
        param = make(shards, 64 // tp, 64, {"tp_rank": p.tp_rank, "tp_size": tp})
        param.load_row_parallel_weight(whole)
        parts.append(param)
    assert torch.equal(torch.cat(parts, dim=1), whole)


def test_TP_04_a_split_inside_a_block_is_refused_when_the_parameter_is_made() -> None:
    at = {"tp_rank": 0, "tp_size": 4}
    with pytest.raises(ModelError) as caught:
        make(split_shards([48], 4, prefix=""), 16, 16, at)
    assert caught.value.code == "TP_INDIVISIBLE"
    assert caught.value.detail == {"legal": [1, 2, 3, 6], "partition": 12, "block": 8, "tp_size": 4}
    assert "l.qkv.weight_scale_inv" in str(caught.value)
    with pytest.raises(ModelError) as caught:
        make([Shard(0, 0, 0, 16, replicas=4)], 12, 48, at)
    assert "input" in str(caught.value)


def test_a_head_that_every_rank_holds_whole_may_end_inside_a_block() -> None:
    shards = [Shard("q", 0, 0, 8), Shard("k", 1, 8, 4, 2), Shard("v", 2, 12, 4, 2)]
    param = make(shards, 8, 8, {"tp_rank": 1, "tp_size": 2})
    for shard, rows in zip(shards, (2, 1, 1), strict=True):
        param.load_qkv_weight(randn(rows, 1, seed=shard.index), shard=shard)
    assert torch.equal(param[1], randn(1, 1, seed=1)[0])
    assert torch.equal(param[0], randn(2, 1)[1])


def test_a_fused_scale_whose_parts_share_a_block_is_refused() -> None:
    shards = split_shards([12, 12], 1, prefix="")
    param = make(shards, 8, 8, {"tp_rank": 0, "tp_size": 1})
    with unchanged_by(param), pytest.raises(WeightLoadError, match="borders of 8"):
        list(param.split_fused(torch.zeros(3, 1), shards))


def test_wrong_shapes_are_refused_and_nothing_is_written() -> None:
    shards = split_shards([64, 32], 2, prefix="")
    param = make(shards, 32, 32, {"tp_rank": 1, "tp_size": 2})
    with unchanged_by(param):
        for shape in ((8, 3), (4, 4), (8,), ()):
            with pytest.raises(WeightLoadError):
                param.load_merged_column_weight(torch.zeros(shape), shard=shards[0])
    with pytest.raises(ModelError, match="blocks are needed"):
        BlockQuantScaleParameter(
            torch.zeros(3, 3),
            block_n=8,
            block_k=8,
            shards=shards,
            input_size_per_partition=32,
            input_size=32,
            tp_rank=0,
            tp_size=2,
        )
