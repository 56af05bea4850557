"""Layers on meta, loaded from lazy tensors, hold what the same layers hold from real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers.ranks import build_ranks, randn
from loadkit.build import parameters_on_meta
from loadkit.config import ParallelConfig
from loadkit.tracing.lazy_tensor import generated
from loadkit.tracing.reading import read_now
from loadkit.tracing.recorder import Recorder
from loadkit.tracing.storage import GeneratedLeaf, Value
from loadkit.tracing.view import View
from loadkit_layers import (
    BlockQuantScaleParameter,
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    ParallelLMHead,
    PerTensorScaleParameter,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)

K = 16


def lazy(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without data that knows how to make any region of ``tensor``."""
    flat = tensor.reshape(-1)

    def make(view: View) -> torch.Tensor:
        return flat.as_strided(view.size, view.stride, view.offset)

    return generated(GeneratedLeaf(name, tuple(tensor.shape), tensor.dtype, make))


def recorded(recorder: Recorder, param: torch.Tensor) -> torch.Tensor:
    """What the program put into a parameter."""
    storage = recorder.tracked(param)
    assert storage is not None
    shape, itemsize = tuple(param.shape), param.dtype.itemsize
    view = View(shape, param.stride(), int(param.storage_offset()), itemsize)
    return read_now(Value(storage, len(storage.writes), view, param.dtype), None)


class Scaled(UnquantizedLinearMethod):
    """Plain weights, a scale per shard and scales per block of 4 x 4, as fp8 methods have them."""

    def create_weights(self, layer: Any, inp: int, outs: Any, *rest: Any, **attrs: Any) -> None:
        super().create_weights(layer, inp, outs, *rest, **attrs)
        layer.input_scale = PerTensorScaleParameter(torch.empty(len(outs)), **attrs)
        shape = BlockQuantScaleParameter.shape_for(layer.output_shards, inp, 4, 4)
        layer.weight_scale_inv = BlockQuantScaleParameter(
            torch.empty(shape),
            block_n=4,
            block_k=4,
            shards=layer.output_shards,
            input_size_per_partition=inp,
            input_size=layer.input_size,
            **attrs,
        )


class ScaledConfig:
    def get_quant_method(self, layer: LinearBase, prefix: str) -> Scaled:
        return Scaled()


Make = Callable[[ParallelConfig], torch.nn.Module]
Loads = list[tuple[Any, ...]]
scaled: Any = {"quant_config": ScaledConfig()}
CASES: list[Any] = [
    pytest.param(
        lambda p: ColumnParallelLinear(K, 8, parallel=p),
        [("weight", (8, K)), ("bias", (8,))],
        id="column",
    ),
    pytest.param(
        lambda p: RowParallelLinear(K, 8, parallel=p, params_dtype=torch.bfloat16),
        [("weight", (8, K)), ("bias", (8,))],
        id="row_cast",
    ),
    pytest.param(
        lambda p: MergedColumnParallelLinear(K, [8, 16], parallel=p),
        [("weight", (24, K)), ("bias", (16,), 1), ("bias", (8,), 0)],
        id="merged",
    ),
    pytest.param(
        lambda p: QKVParallelLinear(K, 4, 8, 2, parallel=p),
        [
            ("weight", (8, K), "k"),
            ("weight", (32, K), "q"),
            ("weight", (8, K), "v"),
            ("bias", (48,)),
        ],
        id="qkv",
    ),
    pytest.param(
        lambda p: QKVParallelLinear(K, 4, 8, 2, False, parallel=p, **scaled),
        [
            ("weight", (48, K)),
            *(("input_scale", shape, i) for shape, i in (((), "q"), ((1,), "k"), ((1, 1), "v"))),
            ("weight_scale_inv", (12, 4)),
        ],
        id="qkv_scales",
    ),
    pytest.param(
        lambda p: ParallelLMHead(41, 8, bias=True, parallel=p),
        [("weight", (41, 8)), ("bias", (41,))],
        id="head",
    ),
]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(("make", "loads"), CASES)
def test_a_traced_load_equals_a_real_one(make: Make, loads: Loads, tp: int) -> None:
    tensors = [randn(*shape, seed=i) for i, (_, shape, *_) in enumerate(loads)]
    reals = build_ranks(tp, make)
    for rank, real in enumerate(reals):
        with Recorder() as recorder:
            with parameters_on_meta():
                traced = make(ParallelConfig(tp_size=tp, tp_rank=rank))
            recorder.begin_load()
            for (name, _, *shard), tensor in zip(loads, tensors, strict=True):
                param = getattr(traced, name)
                param.weight_loader(param, lazy(name, tensor), *shard)
        for (name, _, *shard), tensor in zip(loads, tensors, strict=True):
            param = getattr(real, name)
            param.weight_loader(param, tensor, *shard)
        assert not recorder.data_reads
        for name, param in traced.named_parameters():
            assert param.device.type == "meta"
            assert torch.equal(recorded(recorder, param), getattr(real, name))
