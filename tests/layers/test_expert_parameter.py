"""``ExpertParameter``: an expert's tensors are cut like a linear layer's, whatever they are."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch

from helpers.ranks import only_views_and_writes, randn, unchanged_by
from loadkit.errors import WeightLoadError
from loadkit_layers import (
    ChannelQuantScaleParameter,
    ExpertParameter,
    GroupQuantScaleParameter,
    ModelWeightParameter,
    PackedParameter,
    PerTensorScaleParameter,
    Shard,
)

E, D, INNER, GROUP = 3, 8, 16, 4


def w13(make: Any, shape: tuple[int, ...], rank: int, size: int, **dtype: Any) -> Any:
    inner = INNER // size
    shards = (Shard("w1", 0, 0, inner), Shard("w3", 1, inner, inner))
    return ExpertParameter(
        torch.zeros((E, *shape), **dtype), member=make, shards=shards, tp_rank=rank, tp_size=size
    )


def w2(make: Any, shape: tuple[int, ...], rank: int, size: int, **dtype: Any) -> Any:
    shards = (Shard("w2", 0, 0, D, replicas=size),)
    return ExpertParameter(
        torch.zeros((E, *shape), **dtype), member=make, shards=shards, tp_rank=rank, tp_size=size
    )


weight = partial(ModelWeightParameter, output_dim=0, input_dim=1)
grouped = partial(GroupQuantScaleParameter, output_dim=0, input_dim=1)
channel = partial(ChannelQuantScaleParameter, output_dim=0)
packed = partial(PackedParameter, output_dim=0, input_dim=1, packed_dim=0, packed_factor=4)


def filled(params: list[Any], tensors: dict[str, torch.Tensor]) -> None:
    """Every expert's shards into every rank's parameter; expert e's are e times as large."""
    for param in params:
        for expert in range(E):
            for shard, value in tensors.items():
                larger = value * (expert + 1)
                with only_views_and_writes():
                    param.load_expert(larger, expert, shard)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("make", "columns"), [(weight, D), (grouped, D // GROUP), (channel, 1)],
    ids=["weight", "group_scales", "channel_scales"],
)  # fmt: skip
def test_gate_and_up_are_cut_along_the_output(make: Any, columns: int, size: int) -> None:
    gate, up = randn(INNER, columns), randn(INNER, columns, seed=1)
    params = [w13(make, (2 * INNER // size, columns), rank, size) for rank in range(size)]
    filled(params, {"w1": gate, "w3": up})
    for expert in range(E):
        for shard, value in (("w1", gate), ("w3", up)):
            parts = [param.part(expert, shard) for param in params]
            assert torch.equal(torch.cat(parts), value * (expert + 1))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("make", "columns"), [(weight, INNER), (grouped, INNER // GROUP)],
    ids=["weight", "group_scales"],
)  # fmt: skip
def test_down_is_cut_along_the_input(make: Any, columns: int, size: int) -> None:
    down = randn(D, columns)
    params = [w2(make, (D, columns // size), rank, size) for rank in range(size)]
    filled(params, {"w2": down})
    for expert in range(E):
        parts = [param.part(expert, "w2") for param in params]
        assert torch.equal(torch.cat(parts, dim=1), down * (expert + 1))


def test_packed_weights_are_cut_on_their_borders() -> None:
    gate = torch.arange(INNER // 4 * D, dtype=torch.int32).view(INNER // 4, D)
    params = [w13(packed, (2 * INNER // 8, D), rank, 2, dtype=torch.int32) for rank in range(2)]
    filled(params, {"w1": gate, "w3": -gate})
    for shard, value in (("w1", gate), ("w3", -gate)):
        assert torch.equal(torch.cat([param.part(2, shard) for param in params]), value * 3)


def test_a_scale_per_shard_and_a_scale_per_expert() -> None:
    both = w13(PerTensorScaleParameter, (2,), 0, 2)
    for shape in ((), (1,), (1, 1)):
        both.load_expert(torch.full(shape, 3.0), 1, "w1")
        both.load_expert(torch.full(shape, 4.0), 1, "w3")
        assert both.tolist() == [[0, 0], [3, 4], [0, 0]]
        assert both.part(1, "w3").item() == 4
        down = w2(PerTensorScaleParameter, (1,), 1, 2)
        down.load_expert(torch.full(shape, 5.0), 2, "w2")
        assert down.flatten().tolist() == [0, 0, 5]
    both.load_expert(torch.tensor([8.0, 9.0]), 0, None)
    assert both[0].tolist() == [8, 9]


def test_what_does_not_fit_is_refused() -> None:
    param = w13(weight, (INNER, D), 0, 2)
    with unchanged_by(param):
        for shape, shard in (((INNER - 1, D), "w1"), ((INNER, D), "w2"), ((INNER, D), None)):
            with pytest.raises(WeightLoadError):
                param.load_expert(torch.ones(shape), 0, shard)


def test_copies_keep_how_they_load() -> None:
    param = w13(weight, (INNER, D), 1, 2)
    for twin in (copy.deepcopy(param), pickle.loads(pickle.dumps(param))):
        with unchanged_by(param):
            twin.load_expert(randn(INNER, D), 1, "w3")
        assert torch.equal(twin.part(1, "w3"), randn(INNER, D)[INNER // 2 :])
        assert isinstance(twin, ExpertParameter) and twin.tp_rank == 1
