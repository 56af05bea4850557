"""Weight loaders on real tensors: exact copies, and nothing lost or broadcast in silence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loadkit.errors import WeightLoadError
from loadkit.weight_loaders import (
    composed_weight_loader,
    default_weight_loader,
    row_parallel_weight_loader,
    set_weight_attrs,
    sharded_weight_loader,
)


def param(*shape: int, rank: int | None = None, size: int | None = None, **kwargs) -> torch.Tensor:
    made = torch.nn.Parameter(torch.full(shape, -7, **kwargs), requires_grad=False)
    if rank is not None:
        made.tp_rank = rank
    if size is not None:
        made.tp_size = size
    return made


def test_the_default_loader_copies_exactly_and_casts() -> None:
    weight = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    same = param(3, 4, dtype=torch.float32)
    default_weight_loader(same, weight)
    assert torch.equal(same, weight)
    half = param(3, 4, dtype=torch.bfloat16)
    default_weight_loader(half, weight)
    assert torch.equal(half, weight.bfloat16())


@pytest.mark.parametrize(
    ("there", "given_shape"),
    [
        pytest.param(a, b, id=f"Q-01-{a}-{b}")
        for a in ((), (1,), (1, 1))
        for b in ((), (1,), (1, 1))
    ],
)
def test_Q_01_single_elements_fit_each_other(there, given_shape) -> None:
    for loader, target in (
        (default_weight_loader, param(*there, dtype=torch.float32)),
        (sharded_weight_loader(0), param(*there, dtype=torch.float32, rank=1, size=2)),
        (row_parallel_weight_loader, param(*there, dtype=torch.float32, rank=1, size=2)),
    ):
        loader(target, torch.full(given_shape, 0.5))
        assert target.item() == 0.5


@pytest.mark.parametrize(
    ("shape", "loaded"),
    [
        pytest.param((4,), (1,), id="Q-01-one-into-many"),
        pytest.param((4,), (), id="Q-01-scalar-into-many"),
        pytest.param((2, 3), (3,), id="row-into-matrix"),
        pytest.param((2, 3), (3, 2), id="transposed"),
        pytest.param((2, 3), (6,), id="flattened"),
        pytest.param((40, 16), (42, 16), id="CFG-05-more-rows"),
    ],
)
def test_another_shape_is_an_error_with_both_and_nothing_is_written(shape, loaded) -> None:
    target = param(*shape, dtype=torch.float32)
    with pytest.raises(WeightLoadError) as caught:
        default_weight_loader(target, torch.ones(loaded))
    assert str(list(shape)) in str(caught.value)
    assert str(list(loaded)) in str(caught.value)
    assert caught.value.detail["checkpoint_shape"] == list(loaded)
    assert caught.value.detail["parameter_shape"] == list(shape)
    assert bool((target == -7).all())


@pytest.mark.parametrize(
    ("kind", "loaded"),
    [
        (torch.float32, torch.complex64),
        (torch.int8, torch.float32),
        (torch.uint8, torch.bfloat16),
        (torch.int64, torch.complex64),
    ],
)
def test_a_cast_that_loses_the_kind_of_number_is_refused(kind, loaded) -> None:
    with pytest.raises(WeightLoadError, match="would lose"):
        default_weight_loader(param(2, dtype=kind), torch.ones(2, dtype=loaded))


def test_integers_become_floats_and_complex_stays_complex() -> None:
    target = param(2, dtype=torch.float32)
    default_weight_loader(target, torch.tensor([1, 2]))
    assert target.tolist() == [1.0, 2.0]
    target = param(2, dtype=torch.complex64)
    default_weight_loader(target, torch.tensor([1j, 2.0]))
    assert target.tolist() == [1j, 2]


@given(axis=st.integers(0, 2), size=st.integers(1, 4), negative=st.booleans())
def test_TP_08_the_ranks_differ_and_concatenate_to_the_whole(axis, size, negative) -> None:
    shape = [2, 3, 4]
    whole = list(shape)
    whole[axis] *= size
    weight = torch.arange(float(torch.Size(whole).numel())).reshape(whole)
    parts = [param(*shape, rank=r, size=size, dtype=torch.float32) for r in range(size)]
    for part in parts:
        sharded_weight_loader(axis - 3 if negative else axis)(part, weight)
    assert torch.equal(torch.cat(list(parts), dim=axis), weight)
    assert len({tuple(p.flatten().tolist()) for p in parts}) == size


def test_TP_08_row_parallel_takes_dim_0_and_replicates_a_bias() -> None:
    weight = torch.arange(12.0).reshape(6, 2)
    for rank in range(3):
        part = param(2, 2, rank=rank, size=3, dtype=torch.float32)
        row_parallel_weight_loader(part, weight)
        assert torch.equal(part, weight[2 * rank : 2 * rank + 2])
        long = param(2, rank=rank, size=3, dtype=torch.float32)
        row_parallel_weight_loader(long, torch.arange(6.0))
        assert long.tolist() == [2.0 * rank, 2.0 * rank + 1]
        bias = param(2, rank=rank, size=3, dtype=torch.float32)
        row_parallel_weight_loader(bias, torch.tensor([5.0, 6.0]))
        assert bias.tolist() == [5, 6]


@pytest.mark.parametrize("loader", [row_parallel_weight_loader, sharded_weight_loader(0)])
@pytest.mark.parametrize("place", [{}, {"rank": 0}, {"size": 2}, {"rank": 2, "size": 2}])
def test_TP_08_a_missing_rank_is_a_TypeError_never_rank_0(loader, place) -> None:
    with pytest.raises(TypeError, match="tp_rank"):
        loader(param(2, 2, dtype=torch.float32, **place), torch.ones(4, 2))


@pytest.mark.parametrize("rows", [2, 3, 5, 8])
def test_a_shard_needs_exactly_all_ranks_rows(rows: int) -> None:
    target = param(2, 2, rank=0, size=2, dtype=torch.float32)
    with pytest.raises(WeightLoadError, match=r"takes \[4, 2\]"):
        sharded_weight_loader(0)(target, torch.ones(rows, 2))


def test_an_axis_that_is_not_there_is_an_error() -> None:
    with pytest.raises(WeightLoadError, match="axis 2"):
        sharded_weight_loader(2)(param(2, 2, rank=0, size=2), torch.ones(4, 2))


def test_a_composed_loader_sees_the_rank_own_part() -> None:
    a_log = torch.linspace(0.0, 1.0, 6)
    loader = composed_weight_loader(sharded_weight_loader(0), lambda x: -torch.exp(x.float()))
    for rank in range(2):
        part = param(3, rank=rank, size=2, dtype=torch.float32)
        loader(part, a_log)
        assert torch.equal(part, -torch.exp(a_log[3 * rank : 3 * rank + 3]))


def test_a_composed_loader_that_changes_the_shape_is_an_error() -> None:
    with pytest.raises(WeightLoadError):
        composed_weight_loader(default_weight_loader, lambda x: x.sum())(
            param(3), torch.ones(3).long()
        )


def test_attributes_are_set_once() -> None:
    target = param(1)
    set_weight_attrs(target, {"output_dim": 0})
    set_weight_attrs(target, None)
    assert target.output_dim == 0
    with pytest.raises(WeightLoadError, match="output_dim"):
        set_weight_attrs(target, {"output_dim": 1})
