"""Every parameter class: all ranks, loaded from one tensor, join to it; misfits are refused."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch

from helpers.ranks import only_views_and_writes, randn, unchanged_by
from loadkit.errors import WeightLoadError
from loadkit_layers import (
    BaseParameter,
    ChannelQuantScaleParameter,
    ColumnParameter,
    GroupQuantScaleParameter,
    ModelWeightParameter,
    PackedParameter,
    PerTensorScaleParameter,
    RowParameter,
    Shard,
)

# N output rows, K input columns, R tp size, G rows of each of two kv shards.
N, K, G = 64, 32, 16
TPS = [1, 2, 4, 8]


def make(kind: type[BaseParameter], shape: tuple[int, ...], **attrs: Any) -> BaseParameter:
    dtype = attrs.pop("dtype", torch.float32)
    return kind(torch.full(shape, 99, dtype=dtype), parameter_name="l.w", **attrs)


def places(tp: int) -> list[dict[str, int]]:
    return [{"tp_rank": rank, "tp_size": tp} for rank in range(tp)]


def qkv_shards(tp: int, q: int = N, kv: int = G, kv_heads: int = 2) -> list[Shard]:
    """One rank's shards of q rows and twice kv rows, kv in ``kv_heads`` indivisible heads."""
    replicas = max(1, tp // kv_heads)
    own, kv_own = q // tp, kv * replicas // tp
    return [
        Shard("q", 0, 0, own),
        Shard("k", 1, own, kv_own, replicas),
        Shard("v", 2, own + kv_own, kv_own, replicas),
    ]


# kind, attributes, where the output and the input lie, and the entries per row and column
CASES = [
    pytest.param(ModelWeightParameter, {"output_dim": 0, "input_dim": 1}, 1, 1, id="weight"),
    pytest.param(ModelWeightParameter, {"output_dim": 1, "input_dim": 0}, 1, 1, id="transposed"),
    pytest.param(
        PackedParameter,
        {"output_dim": 0, "input_dim": 1, "packed_dim": 0, "packed_factor": 2, "dtype": torch.int8},
        2,
        1,
        id="packed_output",
    ),
    pytest.param(
        PackedParameter,
        {
            "output_dim": 1,
            "input_dim": 0,
            "packed_dim": 0,
            "packed_factor": 4,
            "dtype": torch.int32,
        },
        1,
        4,
        id="packed_input",
    ),
    pytest.param(
        PackedParameter,
        {
            "output_dim": 0,
            "input_dim": 1,
            "packed_dim": 0,
            "packed_factor": Fraction(8, 4),
            "dtype": torch.uint8,
        },
        2,
        1,
        id="packed_fraction",
    ),
    pytest.param(GroupQuantScaleParameter, {"output_dim": 0, "input_dim": 1}, 1, 4, id="group"),
    pytest.param(GroupQuantScaleParameter, {"output_dim": 1, "input_dim": 0}, 1, 4, id="group_t"),
]


def shaped(attrs: dict[str, Any], rows: int, columns: int) -> tuple[int, int]:
    return (rows, columns) if attrs["output_dim"] == 0 else (columns, rows)


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    if dtype.is_floating_point:
        return randn(*shape, seed=seed, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("tp", TPS)
@pytest.mark.parametrize(("kind", "attrs", "per_row", "per_column"), CASES)
def test_column_row_merged_and_qkv_join_to_the_checkpoint(
    kind: Any, attrs: dict[str, Any], per_row: int, per_column: int, tp: int
) -> None:
    dtype = attrs.get("dtype", torch.float32)
    rows, columns = N // per_row, K // per_column
    whole = numbers(shaped(attrs, rows, columns), dtype)

    parts = [make(kind, shaped(attrs, rows // tp, columns), **attrs, **at) for at in places(tp)]
    for param in parts:
        with only_views_and_writes():
            param.load_column_parallel_weight(whole)
    assert torch.equal(torch.cat(parts, dim=attrs["output_dim"]), whole)

    parts = [make(kind, shaped(attrs, rows, columns // tp), **attrs, **at) for at in places(tp)]
    for param in parts:
        with only_views_and_writes():
            param.load_row_parallel_weight(whole)
    assert torch.equal(torch.cat(parts, dim=attrs["input_dim"]), whole)

    shards = qkv_shards(tp)
    k, v = (numbers(shaped(attrs, G // per_row, columns), dtype, seed) for seed in (1, 2))
    own = sum(shard.size for shard in shards) // per_row
    for fused in (False, True):
        parts = [make(kind, shaped(attrs, own, columns), **attrs, **at) for at in places(tp)]
        for param in parts:
            together = torch.cat([whole, k, v], attrs["output_dim"])
            with only_views_and_writes():
                pieces = zip(shards, (whole, k, v), strict=True)
                for shard, tensor in param.split_fused(together, shards) if fused else pieces:
                    param.load_qkv_weight(tensor, shard=shard)
        sizes = [shard.size // per_row for shard in shards]
        split = [param.split(sizes, dim=attrs["output_dim"]) for param in parts]
        for i, tensor in enumerate((whole, k, v)):
            got = torch.cat([one[i] for one in split[:: shards[i].replicas]], attrs["output_dim"])
            assert torch.equal(got, tensor)


@pytest.mark.parametrize("tp", TPS)
@pytest.mark.parametrize("tail", [(), (1,)], ids=["[N]", "[N,1]"])
@pytest.mark.parametrize("kind", [ColumnParameter, ChannelQuantScaleParameter])
def test_channel_scales_are_cut_by_output_and_whole_by_input(
    kind: Any, tail: tuple[int, ...], tp: int
) -> None:
    whole = randn(N, *tail)
    parts = [make(kind, (N // tp, *tail), output_dim=0, **at) for at in places(tp)]
    for param in parts:
        param.load_column_parallel_weight(whole)
    assert torch.equal(torch.cat(parts), whole)
    for at in places(tp):
        param = make(kind, (N, *tail), output_dim=0, **at)
        param.load_row_parallel_weight(whole)
        assert torch.equal(param, whole)


@pytest.mark.parametrize("tp", TPS)
def test_a_row_parameter_is_cut_by_input_and_whole_by_output(tp: int) -> None:
    order = torch.arange(K, dtype=torch.int32)  # the g_idx of GPTQ
    parts = [
        make(RowParameter, (K // tp,), input_dim=0, dtype=torch.int32, **at) for at in places(tp)
    ]
    for param in parts:
        param.load_row_parallel_weight(order)
    assert torch.equal(torch.cat(parts), order)
    for at in places(tp):
        param = make(RowParameter, (K,), input_dim=0, dtype=torch.int32, **at)
        param.load_merged_column_weight(order, shard=Shard(1, 1, 5, 5))
        assert torch.equal(param, order)


SCALARS = [
    pytest.param(torch.tensor(0.5), id="[]"),
    pytest.param(torch.tensor([0.5]), id="[1]"),
    pytest.param(torch.tensor([[0.5]]), id="[1,1]"),
]


@pytest.mark.parametrize("scalar", SCALARS)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_Q_01_one_element_fits_one_element_whatever_the_dims(
    shape: tuple[int, ...], scalar: torch.Tensor
) -> None:
    at = {"tp_rank": 1, "tp_size": 2}
    for kind in (BaseParameter, PerTensorScaleParameter):
        for load in ("load_column_parallel_weight", "load_row_parallel_weight"):
            param = make(kind, shape, **at)
            with only_views_and_writes():
                getattr(param, load)(scalar)
            assert param.item() == 0.5
            assert param.shape == shape


@pytest.mark.parametrize("scalar", SCALARS)
def test_Q_01_a_scale_lands_in_the_slot_of_its_shard(scalar: torch.Tensor) -> None:
    for at in places(4):
        param = make(PerTensorScaleParameter, (3,), **at)
        for shard in reversed(qkv_shards(4)):
            value = scalar * (shard.index + 1)
            with only_views_and_writes():
                param.load_qkv_weight(value, shard=shard)
        assert param.tolist() == [0.5, 1.0, 1.5]


@pytest.mark.parametrize("scalar", SCALARS)
def test_one_scale_of_a_fused_tensor_is_the_scale_of_each_shard(scalar: torch.Tensor) -> None:
    param = make(PerTensorScaleParameter, (3,), tp_rank=0, tp_size=1)
    for shard, part in param.split_fused(scalar, qkv_shards(1)):
        param.load_merged_column_weight(part, shard=shard)
    assert param.tolist() == [0.5, 0.5, 0.5]
    for shard, part in param.split_fused(torch.tensor([1.0, 2.0, 3.0]), qkv_shards(1)):
        param.load_merged_column_weight(part, shard=shard)
    assert param.tolist() == [1.0, 2.0, 3.0]


def test_Q_01_more_than_one_element_is_never_squeezed_or_spread() -> None:
    param = make(PerTensorScaleParameter, (3,), tp_rank=0, tp_size=1)
    with unchanged_by(param):
        for bad in (torch.zeros(2), torch.zeros(0), torch.zeros(3, 1)):
            with pytest.raises(WeightLoadError):
                param.load_merged_column_weight(bad, shard=qkv_shards(1)[0])
            with pytest.raises(WeightLoadError):
                list(param.split_fused(bad, qkv_shards(1)))
        with pytest.raises(WeightLoadError):
            param.load_column_parallel_weight(torch.tensor([0.5]))
    alone = make(PerTensorScaleParameter, (1,), tp_rank=0, tp_size=1)
    with unchanged_by(alone), pytest.raises(WeightLoadError):
        alone.load_merged_column_weight(torch.tensor(0.5), shard=qkv_shards(1)[1])


def test_one_element_of_a_cut_dim_is_not_taken_for_the_whole() -> None:
    param = make(ColumnParameter, (1,), output_dim=0, tp_rank=1, tp_size=2)
    with unchanged_by(param), pytest.raises(WeightLoadError, match=r"takes \[2\]"):
        param.load_column_parallel_weight(torch.tensor([0.5]))


@pytest.mark.parametrize(("kind", "attrs", "per_row", "per_column"), CASES)
def test_a_wrong_shape_leaves_every_class_untouched(
    kind: Any, attrs: dict[str, Any], per_row: int, per_column: int
) -> None:
    dtype = attrs.get("dtype", torch.float32)
    param = make(kind, shaped(attrs, 12, 8), **attrs, tp_rank=1, tp_size=2)
    wide = (12 * per_row, 16, 5, 0)
    shard = Shard(0, 0, 0, 4)
    with unchanged_by(param):
        for load in ("load_column_parallel_weight", "load_row_parallel_weight"):
            for shape in ((3, 3), (12,), (24, 8, 1), (48, 16), ()):
                with pytest.raises(WeightLoadError) as caught:
                    getattr(param, load)(torch.zeros(shape, dtype=dtype))
                assert caught.value.parameter == "l.w"
        for shape in ((wide[0], 9), (wide[2], 8), (0, 8)):
            with pytest.raises(WeightLoadError):
                param.load_merged_column_weight(torch.zeros(shape, dtype=dtype), shard=shard)


@pytest.mark.parametrize(
    ("kind", "attrs"),
    [
        (BaseParameter, {}),
        (ColumnParameter, {"output_dim": 0}),
        (RowParameter, {"input_dim": 0}),
        (ModelWeightParameter, {"output_dim": 0, "input_dim": 1}),
        (GroupQuantScaleParameter, {"output_dim": 0, "input_dim": 1}),
        (ChannelQuantScaleParameter, {"output_dim": 0}),
        (PerTensorScaleParameter, {}),
        (PackedParameter, {"output_dim": 0, "input_dim": 1, "packed_dim": 0, "packed_factor": 8}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_TP_08_a_forgotten_rank_is_a_type_error(kind: Any, attrs: dict[str, Any]) -> None:
    data = torch.empty(8, 8)
    for forgotten in ({}, {"tp_rank": 0}, {"tp_size": 1}):
        with pytest.raises(TypeError, match="tp_"):
            kind(data, **attrs, **forgotten)
    param = kind(data, **attrs, tp_rank=0, tp_size=1)
    assert param.data_ptr() == data.data_ptr()
    assert not param.requires_grad


def test_a_shard_border_inside_a_packed_entry_is_refused() -> None:
    attrs = {"output_dim": 0, "input_dim": 1, "packed_dim": 0, "packed_factor": 8}
    param = make(PackedParameter, (4, 2), dtype=torch.int32, tp_rank=0, tp_size=2, **attrs)
    with unchanged_by(param), pytest.raises(WeightLoadError, match="packed entries of 8"):
        param.load_merged_column_weight(
            torch.zeros(3, 2, dtype=torch.int32), shard=Shard(0, 0, 0, 12)
        )


@pytest.mark.parametrize(
    ("ours", "theirs", "fits"),
    [
        (torch.bfloat16, torch.float32, True),
        (torch.float32, torch.float16, True),
        (torch.float8_e4m3fn, torch.float8_e4m3fn, True),
        (torch.int32, torch.int64, True),
        (torch.bfloat16, torch.float8_e4m3fn, False),
        (torch.float8_e4m3fn, torch.bfloat16, False),
        (torch.float8_e4m3fn, torch.float8_e5m2, False),
        (torch.float32, torch.int8, False),
        (torch.int8, torch.float32, False),
        (torch.float32, torch.bool, False),
    ],
)
def test_Q_03_raw_numbers_of_another_kind_are_never_cast_into_a_weight(
    ours: torch.dtype, theirs: torch.dtype, fits: bool
) -> None:
    attrs = {"output_dim": 0, "input_dim": 1, "tp_rank": 0, "tp_size": 1}
    param = ModelWeightParameter(torch.zeros(2, 2, dtype=ours), **attrs)
    loaded = torch.ones(2, 2).to(theirs)
    if fits:
        param.load_column_parallel_weight(loaded)
        assert param.float().sum() == 4
    else:
        with pytest.raises(WeightLoadError, match="not cast"):
            param.load_column_parallel_weight(loaded)
        assert param.float().sum() == 0


def test_packed_words_keep_their_width() -> None:
    attrs = {"output_dim": 0, "input_dim": 1, "packed_dim": 1, "packed_factor": 8}
    param = make(PackedParameter, (2, 2), dtype=torch.int32, tp_rank=0, tp_size=1, **attrs)
    with unchanged_by(param), pytest.raises(WeightLoadError, match="int64"):
        param.load_column_parallel_weight(torch.zeros(2, 2, dtype=torch.int64))
