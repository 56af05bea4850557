"""One list of a model's modules is what torch's own walk gives."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import loadkit
from loadkit.build import parameters_on_meta
from loadkit.module_walk import any_says, attribute_of, named_modules, named_paths
from loadkit.tracing.recorder import Recorder
from loadkit.weight_memory import empty_weight


def tree() -> nn.Module:
    """Modules in each other, one twice, one of none, and a circle."""
    model = nn.Module()
    shared = nn.Linear(2, 2)
    model.first = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([shared, nn.ReLU()]))
    model.gone = None
    model.register_module("none", None)
    model.second = nn.ModuleDict({"b": nn.Sequential(), "a": shared})
    model.second.up = model
    return model


def test_the_walk_is_torchs_in_its_order_each_module_once() -> None:
    model = tree()
    assert named_modules(model) == list(model.named_modules())
    assert [name for name, _ in named_modules(model)][:3] == ["", "first", "first.0"]
    assert named_modules(nn.ReLU()) != []


def test_a_shared_module_has_a_path_for_each_of_its_places_and_a_circle_ends() -> None:
    model = tree()
    del model.second._modules["up"]
    paths = list(model.named_modules(remove_duplicate=False))
    assert named_paths(model) == paths
    assert [name for name, _ in paths if name.endswith(("1.0", "second.a"))] != []
    model.second.up = model
    assert named_paths(model) == paths


def test_a_model_with_a_circle_is_planned_and_loaded(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3))
    model[0].up = model
    weights = {"0.weight": torch.ones(3, 2), "0.bias": torch.zeros(3)}
    save_file(weights, tmp_path / "model.safetensors")
    loadkit.load_into(model, tmp_path)
    assert torch.equal(model[0].weight, weights["0.weight"])
    assert torch.equal(model[0].bias, weights["0.bias"])


def test_what_few_modules_say_is_found_wherever_they_say_it() -> None:
    model = tree()
    assert not any_says(model, "is_missing_layer")
    model.first[1][1].is_missing_layer = True
    assert any_says(model, "is_missing_layer")
    assert any_says(nn.Sequential(Layer(2, 3)), "width")
    assert any_says(Wrapper(nn.ReLU()), "anything")  # nobody knows what it has


class Wrapper(nn.Module):
    """One that has its inner module's attributes, as FSDP has."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> object:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


class Layer(nn.Linear):
    """With a class attribute and a property."""

    kind = "layer"

    @property
    def width(self) -> int:
        return self.in_features


def test_an_attribute_is_what_getattr_gives_wherever_a_module_keeps_it() -> None:
    layer = Layer(2, 3)
    layer.method = object()
    layer.register_buffer("scale", torch.ones(1))
    layer.inner = nn.ReLU()
    layer.register_module("none", None)
    names = ("method", "scale", "weight", "inner", "none", "kind", "width", "forward", "missing")
    for module in (layer, Wrapper(layer), nn.ReLU(), None):
        for name in names:
            found, wanted = attribute_of(module, name), getattr(module, name, None)
            assert found is wanted or found == wanted, name


def test_weights_take_memory_but_while_parameters_go_to_meta() -> None:
    assert empty_weight((2, 3), torch.float16).device.type == "cpu"
    with Recorder(), parameters_on_meta():
        weight = empty_weight([2, 3], torch.float16)
        plain = torch.empty(2, 3)
    assert (weight.device.type, weight.dtype, weight.shape) == ("meta", torch.float16, (2, 3))
    assert plain.device.type == "cpu"
    assert empty_weight((1,), torch.float32).device.type == "cpu"
