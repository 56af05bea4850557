"""One list of a model's modules is what torch's own walk gives."""

from __future__ import annotations

import torch
from torch import nn

from loadkit.build import parameters_on_meta
from loadkit.module_walk import attribute_of, named_modules
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
