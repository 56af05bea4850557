"""Construction on meta: what a module is given there is what torch would have given it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from loadkit.build import parameters_on_meta
from loadkit.tracing.recorder import Recorder
from loadkit.weight_memory import full_weight
from loadkit_layers import LayerNorm, RMSNorm


class Doubled(nn.Module):
    """An attribute with a setter of its own."""

    @property
    def width(self) -> int:
        return self.half * 2

    @width.setter
    def width(self, value: int) -> None:
        self.half = value // 2


def test_a_plain_attribute_is_set_as_torch_sets_it() -> None:
    with parameters_on_meta():
        module = Doubled()
        module.width, module.name, module.sizes = 6, "a", [1, 2]
        module.inner = nn.Linear(2, 3)
        module.rows = nn.Parameter(torch.ones(3))
        module.table = nn.Buffer(torch.ones(2))
        module.plain = torch.ones(2)
    assert (module.half, module.width, module.name, module.sizes) == (3, 6, "a", [1, 2])
    assert list(module._modules) == ["inner"]
    assert list(module._parameters) == ["rows"]
    assert list(module._buffers) == ["table"]
    assert module.rows.device.type == "meta"
    assert module.table.device.type == module.plain.device.type == "cpu"
    assert not {"inner", "rows", "table"} & set(module.__dict__)


@pytest.mark.parametrize("name", ["rows", "inner", "table"])
def test_a_registered_name_is_kept_from_plain_values_and_may_be_cleared(name: str) -> None:
    with parameters_on_meta():
        module = nn.Module()
        module.rows = nn.Parameter(torch.ones(3))
        module.inner = nn.Linear(2, 3)
        module.table = nn.Buffer(torch.ones(2))
        with pytest.raises(TypeError, match=f"cannot assign '.*' as .* '{name}'"):
            setattr(module, name, 5)
        setattr(module, name, None)
        assert getattr(module, name) is None


def test_an_attribute_before_the_modules_own_constructor_is_torchs_error() -> None:
    class Early(nn.Module):
        def __init__(self) -> None:
            self.inner = nn.Linear(2, 3)

    with parameters_on_meta(), pytest.raises(AttributeError, match="before Module"):
        Early()


def test_construction_leaves_torch_as_it_was_and_another_setter_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = nn.Module.__setattr__
    with parameters_on_meta():
        assert nn.Module.__setattr__ is not before
    assert nn.Module.__setattr__ is before
    seen: list[str] = []

    def looking(module: nn.Module, name: str, value: Any) -> None:
        seen.append(name)
        before(module, name, value)

    monkeypatch.setattr(nn.Module, "__setattr__", looking)
    with parameters_on_meta():
        nn.Linear(2, 3)
    assert "in_features" in seen
    assert nn.Module.__setattr__ is looking


@pytest.mark.parametrize("value", [0.0, 1.0, -2.5])
def test_a_weight_that_starts_as_one_number_is_that_number_on_meta_too(value: float) -> None:
    real = full_weight((2, 3), value, torch.bfloat16)
    assert torch.equal(real, torch.full((2, 3), value, dtype=torch.bfloat16))
    assert full_weight((2,), value, None).dtype == torch.get_default_dtype()
    with Recorder() as recorder, parameters_on_meta():
        weight = full_weight((2, 3), value, torch.bfloat16)
    assert (weight.device.type, weight.shape, weight.dtype) == ("meta", (2, 3), torch.bfloat16)
    (write,) = recorder.track(weight).writes
    assert (write.value.value, write.value.dtype) == (value, torch.bfloat16)
    assert write.view.size == (2, 3)


def test_norms_hold_their_start_where_they_are_not_loaded() -> None:
    rms, offset, layer = RMSNorm(4), RMSNorm(4, weight_offset=1.0), LayerNorm(4)
    assert rms.weight.tolist() == layer.weight.tolist() == [1.0] * 4
    assert offset.weight.tolist() == layer.bias.tolist() == [0.0] * 4


@pytest.mark.parametrize(
    "initialise",
    [nn.init.kaiming_uniform_, nn.init.normal_, nn.init.uniform_, nn.init.trunc_normal_],
)
def test_an_initialiser_draws_nothing_for_a_parameter_and_all_of_a_buffer(
    initialise: Callable[..., torch.Tensor],
) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with Recorder(), parameters_on_meta():
        module = nn.Module()
        module.rows = nn.Parameter(torch.empty(4, 3))
        assert initialise(module.rows) is module.rows
        assert initialise(tensor=module.rows) is module.rows
        assert torch.equal(torch.get_rng_state(), before)
        module.register_buffer("table", initialise(torch.empty(4, 3)))
    torch.manual_seed(3)
    assert torch.equal(module.table, initialise(torch.empty(4, 3)))


def test_memory_that_holds_nothing_yet_is_seen_by_the_modes_of_others() -> None:
    seen: list[Any] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watching(), Recorder():
        torch.empty(3)
    assert seen == [torch.ops.aten.empty.memory_format]
