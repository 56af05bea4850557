"""Fused projections: from separate tensors or fused on disk, every rank gets its part of each."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.ranks import build_ranks, only_views_and_writes, parallel_of, randn, unchanged_by
from loadkit.config import ParallelConfig
from loadkit.errors import ModelError, WeightLoadError
from loadkit_layers import MergedColumnParallelLinear, QKVParallelLinear

# K input columns; H query heads, G kv heads of S features; values of SV features.
K, H, S = 12, 8, 4
SIZES = [16, 32, 8]


def load(layer: torch.nn.Module, tensor: torch.Tensor, *shard: Any, name: str = "weight") -> None:
    param = getattr(layer, name)
    with only_views_and_writes():
        param.weight_loader(param, tensor, *shard)


def merged(parallel: ParallelConfig) -> MergedColumnParallelLinear:
    return MergedColumnParallelLinear(K, SIZES, parallel=parallel, prefix="mlp.gate_up_proj")


def joined(layers: list[Any], name: str = "weight") -> list[torch.Tensor]:
    """Every shard over all ranks, one copy of what is replicated."""
    parts = [getattr(layer, name).split(layer.output_partition_sizes) for layer in layers]
    whole = []
    for i, shard in enumerate(layers[0].output_shards):
        whole.append(torch.cat([part[i] for part in parts[:: shard.replicas]]))
    return whole


@pytest.mark.parametrize("how", ["apart", "fused", "tuple", "reordered"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_merged_ranks_join_to_the_checkpoint(tp: int, how: str) -> None:
    weights = [randn(size, K, seed=i) for i, size in enumerate(SIZES)]
    biases = [randn(size, seed=9 + i) for i, size in enumerate(SIZES)]
    layers = build_ranks(tp, merged)
    for layer in layers:
        for name, tensors in (("weight", weights), ("bias", biases)):
            if how == "apart":
                for i, tensor in enumerate(tensors):
                    load(layer, tensor, i, name=name)
            elif how == "fused":
                load(layer, torch.cat(tensors), name=name)
            elif how == "tuple":
                load(layer, torch.cat(tensors[:2]), (0, 1), name=name)
                load(layer, tensors[2], (2,), name=name)
            else:
                load(layer, torch.cat([tensors[2], tensors[0], tensors[1]]), (2, 0, 1), name=name)
    assert all(map(torch.equal, joined(layers), weights))
    assert all(map(torch.equal, joined(layers, "bias"), biases))


@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
@pytest.mark.parametrize("v_size", [S, 6], ids=["same_v", "other_v"])
@pytest.mark.parametrize("G", [1, 2, 4, 8])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_qkv_ranks_join_to_the_checkpoint(tp: int, G: int, v_size: int, fused: bool) -> None:
    tensors = [randn(H * S, K), randn(G * S, K, seed=1), randn(G * v_size, K, seed=2)]
    biases = [randn(len(tensor), seed=5) for tensor in tensors]
    layers = build_ranks(
        tp, lambda p: QKVParallelLinear(K, S, H, G, parallel=p, v_head_size=v_size)
    )
    for layer in layers:
        for name, parts in (("weight", tensors), ("bias", biases)):
            if fused:
                load(layer, torch.cat(parts), name=name)
            else:
                for shard, tensor in zip("qkv", parts, strict=True):
                    load(layer, tensor, shard, name=name)
        assert layer.num_kv_heads * tp == G * layer.num_kv_head_replicas
    assert all(map(torch.equal, joined(layers), tensors))
    assert all(map(torch.equal, joined(layers, "bias"), biases))


def test_more_ranks_than_kv_heads_hold_the_same_head_in_neighbours() -> None:
    layers = build_ranks(8, lambda p: QKVParallelLinear(K, S, H, 2, False, parallel=p))
    k = randn(2 * S, K)
    for layer in layers:
        load(layer, k, "k")
    heads = [layer.weight[S : 2 * S] for layer in layers]
    assert all(torch.equal(heads[rank], k[rank // 4 * S :][:S]) for rank in range(8))


def test_kv_heads_default_to_query_heads() -> None:
    layer = QKVParallelLinear(K, S, H, bias=False, parallel=ParallelConfig())
    assert layer.total_num_kv_heads == H
    assert layer.weight.shape == (3 * H * S, K)


@pytest.mark.parametrize(
    ("heads", "kv", "tp", "legal"),
    [
        (9, 3, 2, [1, 3, 9]),
        (12, 6, 4, [1, 2, 3, 6, 12]),
        (8, 8, 3, [1, 2, 4, 8]),
    ],
)
def test_heads_that_do_not_divide_name_the_legal_tp_sizes(
    heads: int, kv: int, tp: int, legal: list[int]
) -> None:
    with pytest.raises(ModelError) as caught:
        QKVParallelLinear(K, S, heads, kv, parallel=parallel_of(tp)[0], prefix="l.0.qkv_proj")
    assert caught.value.code == "TP_INDIVISIBLE"
    assert caught.value.detail["legal"] == legal
    assert "l.0.qkv_proj" in str(caught.value)


def test_merged_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ModelError) as caught:
        MergedColumnParallelLinear(K, [12, 8], parallel=parallel_of(3)[0])
    assert caught.value.detail["legal"] == [1, 2, 4]


@pytest.mark.parametrize("shard", [0, None, (0, 1), (2, 1)])
@pytest.mark.parametrize("shape", [(7, K), (sum(SIZES), K + 1), (sum(SIZES),), (), (1,)])
def test_a_wrong_shape_is_refused_and_nothing_is_written(
    shard: Any, shape: tuple[int, ...]
) -> None:
    layer = merged(parallel_of(2)[1])
    layer.weight.data.fill_(7)
    with unchanged_by(layer.weight), pytest.raises(WeightLoadError) as caught:
        layer.weight.weight_loader(layer.weight, torch.zeros(shape), shard)
    assert caught.value.parameter == "mlp.gate_up_proj.weight"
    assert str(list(shape)) in str(caught.value)


@pytest.mark.parametrize("shard", [3, -1, "q", (0, 5)])
def test_an_unknown_shard_is_refused(shard: Any) -> None:
    layer = merged(ParallelConfig())
    with unchanged_by(layer.weight.data.fill_(7)), pytest.raises(WeightLoadError, match="shard"):
        layer.weight.weight_loader(layer.weight, torch.zeros(SIZES[0], K), shard)


def test_TP_08_ranks_of_fused_layers_differ() -> None:
    qkv = torch.arange(3.0 * H * S * K).view(-1, K)
    first, second = build_ranks(2, lambda p: QKVParallelLinear(K, S, H, bias=False, parallel=p))
    load(first, qkv)
    load(second, qkv)
    assert all(
        not torch.equal(a, b)
        for a, b in zip(first.weight.chunk(3), second.weight.chunk(3), strict=True)
    )


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_plain_parameters_with_dims_load_like_our_own(tp: int) -> None:
    """A third party's method that makes plain parameters and sets attributes on them."""
    from loadkit_layers import UnquantizedLinearMethod

    class Plain(UnquantizedLinearMethod):
        def create_weights(
            self, layer: Any, inp: int, outs: Any, i: int, o: int, dtype: Any, **attrs: Any
        ) -> None:
            weight = torch.nn.Parameter(torch.empty(inp, sum(outs), dtype=dtype), False)
            scale = torch.nn.Parameter(torch.empty(len(outs)), requires_grad=False)
            for key, value in {"input_dim": 0, "output_dim": 1, **attrs}.items():
                setattr(weight, key, value)
            for key, value in {"needs_scalar_to_array": True, **attrs}.items():
                setattr(scale, key, value)
            layer.register_parameter("weight", weight)
            layer.register_parameter("scale", scale)

    class Config:
        def get_quant_method(self, layer: Any, prefix: str) -> Plain:
            return Plain()

    q, k, v = randn(K, H * S), randn(K, 2 * S, seed=1), randn(K, 2 * S, seed=2)
    config: Any = Config()
    layers = build_ranks(
        tp, lambda p: QKVParallelLinear(K, S, H, 2, False, parallel=p, quant_config=config)
    )
    for layer in layers:
        for shard, tensor in zip("qkv", (q, k, v), strict=True):
            load(layer, tensor, shard)
        load(layer, torch.tensor(0.5), "q", name="scale")
        load(layer, torch.tensor([[0.25]]), "k", name="scale")
        load(layer, torch.tensor([2.0]), "v", name="scale")
        assert layer.scale.tolist() == [0.5, 0.25, 2.0]
    parts = [layer.weight.split(layer.output_partition_sizes, dim=1) for layer in layers]
    for i, tensor in enumerate((q, k, v)):
        step = layers[0].output_shards[i].replicas
        assert torch.equal(torch.cat([part[i] for part in parts[::step]], dim=1), tensor)
