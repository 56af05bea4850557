"""Copies that were seen before are recorded again, and nothing else is."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import loadkit
from benchmarks.generate import Moe
from helpers.checkpoints import llama_sd, write_llama, write_st
from loadkit.auto_weights_loader import AutoWeightsLoader
from loadkit.build import parameters_on_meta
from loadkit.config import ParallelConfig
from loadkit.load_plan import LoadPlan
from loadkit.tensor_info import TensorInfo
from loadkit.tracing import known_copies
from loadkit.tracing.lazy_tensor import Offered
from loadkit.tracing.recorder import Recorder
from loadkit.tracing.regions import copies_regions, copy_region
from loadkit_layers import MergedColumnParallelLinear, RMSNorm
from loadkit_layers.fused_moe.parameter import ExpertParameter

LAYERS, TP = 4, 2
BF16 = torch.bfloat16
PARALLEL = [ParallelConfig(tp_size=TP, tp_rank=rank) for rank in range(TP)]


def plans(folder: Path) -> list[LoadPlan]:
    return [loadkit.plan(folder, parallel=parallel, dtype="bfloat16") for parallel in PARALLEL]


def without_knowing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_copies, "_key", lambda *args: None)


def test_a_plan_is_the_same_with_and_without_what_was_seen_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_llama(tmp_path, layers=LAYERS, heads=8, kv_heads=2, hidden=64)
    knowing = plans(tmp_path)
    models = [loadkit.load_model(tmp_path, parallel=each) for each in PARALLEL]
    without_knowing(monkeypatch)
    for made, plain in zip(knowing, plans(tmp_path), strict=True):
        assert made.ok
        assert made.rows == plain.rows
        assert made.to_dict() == plain.to_dict()
    for parallel, model in zip(PARALLEL, models, strict=True):
        again = loadkit.load_model(tmp_path, parallel=parallel).state_dict()
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, again[name]), name


def test_each_kind_of_layer_runs_its_loader_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_llama(tmp_path, layers=LAYERS)
    runs: list[tuple[str, Any]] = []
    load_shard = MergedColumnParallelLinear.load_shard

    def counting(self: Any, param: Any, loaded: torch.Tensor, shard: Any) -> None:
        runs.append((self.prefix, shard.id))
        load_shard(self, param, loaded, shard)

    monkeypatch.setattr(MergedColumnParallelLinear, "load_shard", counting)
    loadkit.plan(tmp_path)
    assert runs == [("model.layers.0.mlp.gate_up_proj", 0), ("model.layers.0.mlp.gate_up_proj", 1)]
    runs.clear()
    without_knowing(monkeypatch)
    loadkit.plan(tmp_path)
    assert len(runs) == 2 * LAYERS


def test_the_layer_whose_tensor_has_another_shape_is_the_one_that_is_named(tmp_path: Path) -> None:
    tensors = llama_sd(layers=LAYERS)
    name = "model.layers.2.mlp.up_proj.weight"
    tensors[name] = tensors[name][:-2].contiguous()
    write_llama(tmp_path, layers=LAYERS)
    write_st(tmp_path / "model.safetensors", tensors)
    plan = loadkit.plan(tmp_path)
    assert [(p.code, p.tensor) for p in plan.problems if "SHAPE" in p.code] == [
        ("SHAPE_MISMATCH", name)
    ]


# ---------------------------------------------------------------- what is alike, and what is not


class File:
    name, size = "a.safetensors", 1 << 20


def offers(*names: str, shape: tuple[int, ...] = (4, 3)) -> list[tuple[str, Any]]:
    file: Any = File()
    return [
        (name, Offered(TensorInfo(name, file, 64 * at, 2 * prod(shape), shape, "BF16")))
        for at, name in enumerate(names)
    ]


class Layer(nn.Module):
    """Two parameters; its loader looks at ``first`` and at what a test adds."""

    loader_looks_at = ("first",)
    runs = 0

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self.first = first
        self.weight = nn.Parameter(torch.empty(8, 3, dtype=torch.bfloat16), requires_grad=False)
        self.other = nn.Parameter(torch.empty(8, 3, dtype=torch.bfloat16), requires_grad=False)
        self.weight.weight_loader = self.weight_loader  # type: ignore[attr-defined]

    @copies_regions
    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor) -> None:
        type(self).runs += 1
        copy_region(param, loaded, [(0, self.first, 4, 0)])


class Unsaid(Layer):
    """Nobody says what this class looks at."""


class Nothing(Layer):
    """Its loader looks at the parameter and the tensor alone."""

    loader_looks_at = ()

    @copies_regions
    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor) -> None:
        type(self).runs += 1
        copy_region(param, loaded, [(0, 0, 4, 0)])


class Property(Layer):
    """What it looks at is no plain attribute."""

    loader_looks_at = ("first", "second")

    @property
    def second(self) -> int:
        return self.first


class Elsewhere(Layer):
    loader_looks_at = ("first",)

    @copies_regions
    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor) -> None:
        super().weight_loader(param, loaded)
        copy_region(self.other, loaded, [(0, 0, 4, 0)])


class Filled(Layer):
    loader_looks_at = ("first",)

    @copies_regions
    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor) -> None:
        param.data.zero_()
        super().weight_loader(param, loaded)


def traced(*layers: Layer) -> list[list[Any]]:
    """The writes to each layer's two parameters: (target, tensor, its region, dtypes)."""
    model = nn.ModuleList(layers)
    type(layers[0]).runs = 0
    given = offers(*(f"{at}.weight" for at in range(len(layers))))
    with Recorder() as recorder, torch.no_grad():
        recorder.begin_load()
        AutoWeightsLoader(model).load_weights(recorder.observe(given))
    return [
        [
            (w.view, w.dtype, getattr(w.value, "view", None), _name(w.value))
            for param in (layer.weight, layer.other)
            for w in recorder.track(param).writes
        ]
        for layer in layers
    ]


def _name(value: Any) -> str | None:
    return value.storage.base.name if hasattr(value, "storage") else None


def made(kind: type[Layer], *firsts: int) -> list[Layer]:
    with parameters_on_meta():
        return [kind(first) for first in firsts]


def test_layers_that_are_alike_are_run_once_and_each_gets_its_own_tensor() -> None:
    first, second, third = traced(*made(Layer, 2, 2, 2))
    assert Layer.runs == 1
    assert [w[0][3] for w in (first, second, third)] == ["0.weight", "1.weight", "2.weight"]
    assert first[0][:3] == second[0][:3] == third[0][:3]
    assert first[0][0].offset == 2 * 3


@pytest.mark.parametrize(
    ("kind", "firsts", "runs"),
    [
        (Nothing, (0, 4), 1),
        (Layer, (0, 4), 2),
        *((kind, (0, 0), 2) for kind in (Unsaid, Property, Elsewhere, Filled)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_may_differ_or_is_more_than_copies_is_run_each_time(
    kind: type[Layer], firsts: tuple[int, ...], runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = traced(*made(kind, *firsts))
    assert kind.runs == runs
    without_knowing(monkeypatch)
    assert traced(*made(kind, *firsts)) == seen


@pytest.mark.parametrize("mark", [1, ["may change"]], ids=["another value", "no fixed value"])
def test_a_parameter_with_another_mark_is_not_alike(mark: Any) -> None:
    layers = made(Layer, 0, 0)
    layers[1].weight.tp_rank = mark  # type: ignore[attr-defined]
    traced(*layers)
    assert Layer.runs == 2


def test_a_parameter_with_another_loader_is_not_alike() -> None:
    layers = made(Layer, 0, 0)

    @copies_regions
    def other(param: nn.Parameter, loaded: torch.Tensor) -> None:
        copy_region(param, loaded, [(0, 4, 4, 0)])

    layers[1].weight.weight_loader = other  # type: ignore[attr-defined]
    first, second = traced(*layers)
    assert Layer.runs == 1
    assert (first[0][0].offset, second[0][0].offset) == (0, 4 * 3)


def test_tensors_of_another_shape_are_not_alike() -> None:
    layers = made(Layer, 0, 0)
    Layer.runs = 0
    with Recorder() as recorder, torch.no_grad():
        recorder.begin_load()
        weights = offers("0.weight") + offers("1.weight", shape=(6, 3))
        AutoWeightsLoader(nn.ModuleList(layers)).load_weights(recorder.observe(weights))
        (write,) = recorder.track(layers[1].weight).writes
    assert Layer.runs == 2
    assert write.value.view.size == (4, 3)  # its first four rows of six


def write_moe(folder: Path) -> None:
    """A toy Qwen3-MoE of three layers."""
    model = Moe("toy", 3, 16, 4, 2, 4, 8, 4, 32, 1)
    (folder / "config.json").write_text(json.dumps(model.config()))
    tensors = {name: torch.zeros(shape, dtype=BF16) for name, shape in model.shapes().items()}
    write_st(folder / "model.safetensors", tensors)


@pytest.mark.parametrize("ep", [1, 2])
def test_experts_of_alike_layers_are_known_by_their_number(
    ep: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_moe(tmp_path)
    ranks = [ParallelConfig(tp_size=2, tp_rank=at, ep_size=ep, ep_rank=at % ep) for at in range(2)]
    runs: list[str] = []
    load_expert = ExpertParameter.load_expert

    def counting(self: Any, loaded: torch.Tensor, slot: int, shard_id: str | None) -> None:
        runs.append(self.parameter_name)
        load_expert(self, loaded, slot, shard_id)

    monkeypatch.setattr(ExpertParameter, "load_expert", counting)
    knowing = [loadkit.plan(tmp_path, parallel=each) for each in ranks]
    assert knowing[0].ok
    assert runs
    assert {name.split(".")[2] for name in runs} == {"0"}  # the first layer's alone
    few = len(runs)
    runs.clear()
    without_knowing(monkeypatch)
    assert [loadkit.plan(tmp_path, parallel=each).to_dict() for each in ranks] == [
        plan.to_dict() for plan in knowing
    ]
    assert len(runs) > few


def test_norms_are_known_by_the_loader_that_every_parameter_gets() -> None:
    with parameters_on_meta():
        norms = [RMSNorm(12) for _ in range(3)]
    given = offers(*(f"{at}.weight" for at in range(3)), shape=(12,))
    with Recorder() as recorder, torch.no_grad():
        recorder.begin_load()
        AutoWeightsLoader(nn.ModuleList(norms)).load_weights(recorder.observe(given))
        assert len(recorder.known_copies) == 1
        for at, norm in enumerate(norms):
            write = recorder.track(norm.weight).writes[-1]
            assert write.value.storage.base.name == f"{at}.weight"
