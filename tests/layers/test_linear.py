"""Every rank of a layer, loaded from one checkpoint tensor, joins to that tensor."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from helpers.ranks import build_ranks, only_views_and_writes, parallel_of, randn, unchanged_by
from loadkit.config import ParallelConfig
from loadkit.errors import ModelError, WeightLoadError
from loadkit_layers import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear

K, N = 24, 16
ONE = ParallelConfig()


def load(layer: torch.nn.Module, **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        param = getattr(layer, name)
        with only_views_and_writes():
            param.weight_loader(param, tensor)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_column_parallel_ranks_join_to_the_checkpoint(tp: int) -> None:
    weight, bias = randn(N, K), randn(N, seed=1)
    layers = build_ranks(tp, lambda p: ColumnParallelLinear(K, N, parallel=p))
    for layer in layers:
        load(layer, weight=weight, bias=bias)
    assert torch.equal(torch.cat([layer.weight for layer in layers]), weight)
    assert torch.equal(torch.cat([layer.bias for layer in layers]), bias)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_row_parallel_ranks_join_to_the_checkpoint_and_hold_the_bias_whole(tp: int) -> None:
    weight, bias = randn(N, K), randn(N, seed=1)
    layers = build_ranks(tp, lambda p: RowParallelLinear(K, N, parallel=p))
    for layer in layers:
        load(layer, weight=weight, bias=bias)
        assert torch.equal(layer.bias, bias)
    assert torch.equal(torch.cat([layer.weight for layer in layers], dim=1), weight)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "kind", [ReplicatedLinear, ColumnParallelLinear, RowParallelLinear], ids=lambda k: k.__name__
)
def test_a_layer_without_tp_is_whole_on_every_rank(kind: Any, tp: int) -> None:
    weight = randn(N, K)
    for layer in build_ranks(tp, lambda p: kind(K, N, False, parallel=p, disable_tp=True)):
        load(layer, weight=weight)
        assert torch.equal(layer.weight, weight)
        assert layer.bias is None


def test_a_checkpoint_of_another_float_dtype_is_cast() -> None:
    layer = ColumnParallelLinear(K, N, False, parallel=ONE, params_dtype=torch.bfloat16)
    load(layer, weight=randn(N, K))
    assert torch.equal(layer.weight, randn(N, K).bfloat16())


def test_params_dtype_is_torchs_default_dtype() -> None:
    assert ReplicatedLinear(K, N, parallel=ONE).weight.dtype == torch.float32


@pytest.mark.parametrize("shape", [(N, K + 1), (N + 8, K), (N // 2, K), (N, K, 1), (N,), (1,), ()])
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear, ReplicatedLinear])
def test_a_wrong_shape_is_refused_and_nothing_is_written(kind: Any, shape: tuple[int, ...]) -> None:
    layer = kind(K, N, False, parallel=parallel_of(2)[1], prefix="model.layers.3.mlp.down_proj")
    layer.weight.data.fill_(7)
    with unchanged_by(layer.weight), pytest.raises(WeightLoadError) as caught:
        layer.weight.weight_loader(layer.weight, torch.zeros(shape))
    error = caught.value
    assert error.parameter == "model.layers.3.mlp.down_proj.weight"
    assert str(list(shape)) in str(error)
    assert str([N, K]) in str(error)
    assert error.detail["checkpoint_shape"] == list(shape)


def test_one_element_is_never_spread_over_many() -> None:
    layer = RowParallelLinear(K, N, parallel=ONE)
    with unchanged_by(layer.bias), pytest.raises(WeightLoadError):
        layer.bias.weight_loader(layer.bias, torch.tensor([0.5]))


def test_parallel_has_no_default() -> None:
    with pytest.raises(TypeError, match="parallel"):
        ColumnParallelLinear(K, N)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("kind", "legal"),
    [(ColumnParallelLinear, [1, 2, 4, 8, 16]), (RowParallelLinear, [1, 2, 3, 4, 6, 8, 12, 24])],
)
def test_an_indivisible_size_names_the_layer_and_the_legal_tp_sizes(
    kind: Any, legal: list[int]
) -> None:
    with pytest.raises(ModelError) as caught:
        kind(K, N, parallel=parallel_of(5)[0], prefix="model.layers.0.mlp.x")
    assert caught.value.code == "TP_INDIVISIBLE"
    assert caught.value.detail["legal"] == legal
    assert "model.layers.0.mlp.x" in str(caught.value)
    assert "tp 5" in str(caught.value)


def test_TP_08_the_ranks_of_every_layer_differ() -> None:
    weight = torch.arange(N * K, dtype=torch.float32).view(N, K)
    for kind in (ColumnParallelLinear, RowParallelLinear):
        first, second = build_ranks(2, lambda p, kind=kind: kind(K, N, False, parallel=p))
        load(first, weight=weight)
        load(second, weight=weight)
        assert not torch.equal(first.weight, second.weight)
        assert (first.weight.tp_rank, first.weight.tp_size) == (0, 2)
        assert (second.weight.tp_rank, second.weight.tp_size) == (1, 2)


def test_forward_at_tp_1_is_torchs_linear() -> None:
    x, weight, bias = randn(5, K, seed=2), randn(N, K), randn(N, seed=1)
    expected = torch.nn.functional.linear(x, weight, bias)
    for kind in (ReplicatedLinear, ColumnParallelLinear, RowParallelLinear):
        layer = kind(K, N, parallel=ONE)
        load(layer, weight=weight, bias=bias)
        y, left = layer(x)
        assert left is None
        assert torch.equal(y, expected)
        alone = kind(K, N, parallel=ONE, return_bias=False)
        load(alone, weight=weight, bias=bias)
        assert torch.equal(alone(x), expected)
        skipping = kind(K, N, parallel=ONE, skip_bias_add=True)
        load(skipping, weight=weight, bias=bias)
        y, left = skipping(x)
        assert torch.equal(y, torch.nn.functional.linear(x, weight))
        assert torch.equal(left, bias)


def test_partial_results_add_the_bias_once() -> None:
    x, weight, bias = randn(5, K, seed=2), randn(N, K), randn(N, seed=1)
    total = torch.zeros(5, N)
    for layer in build_ranks(
        4,
        lambda p: RowParallelLinear(
            K, N, parallel=p, input_is_parallel=False, reduce_results=False, return_bias=False
        ),
    ):
        load(layer, weight=weight, bias=bias)
        total += layer(x)
    expected = torch.nn.functional.linear(x, weight, bias)
    assert torch.allclose(total, expected, atol=1e-5)  # another order of summation


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_and_pickles_keep_class_and_loader(again: Any) -> None:
    layer = ColumnParallelLinear(K, N, parallel=parallel_of(2)[1], prefix="a")
    load(layer, weight=randn(N, K), bias=randn(N))
    twin = again(layer)
    assert type(twin.weight) is type(layer.weight)
    assert torch.equal(twin.weight, layer.weight)
    assert twin.weight.data_ptr() != layer.weight.data_ptr()
    assert twin.weight.weight_loader.__self__ is twin
    twin.weight.weight_loader(twin.weight, randn(N, K, seed=5))
    assert torch.equal(twin.weight, randn(N, K, seed=5)[N // 2 :])
    assert torch.equal(layer.weight, randn(N, K)[N // 2 :])


def test_a_parameter_survives_being_swapped_to_meta_and_back() -> None:
    layer = RowParallelLinear(K, N, False, parallel=parallel_of(2)[1])
    param = layer.weight
    for device in ("meta", "cpu"):
        data = torch.empty_like(param.data, device=device)
        other = torch.Tensor._make_subclass(type(param), data, False)
        other.__dict__.update(param.__dict__)
        torch.utils.swap_tensors(param, other)
    load(layer, weight=randn(N, K))
    assert torch.equal(layer.weight, randn(N, K)[:, K // 2 :])
    assert layer.weight is param
