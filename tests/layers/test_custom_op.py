"""Custom ops: device versions, switches, and replacements by third parties."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from loadkit.errors import ConflictError, PluginError, UnknownNameError
from loadkit_layers import CustomOp, GemmaRMSNorm, RMSNorm, custom_op

Mine = type("Mine", (RMSNorm,), {"forward_native": lambda self, x: x * 0})


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    ops, overrides = dict(custom_op._ops), dict(custom_op._overrides)
    yield
    custom_op._ops.clear()
    custom_op._ops.update(ops)
    custom_op._overrides.clear()
    custom_op._overrides.update(overrides)
    custom_op._disabled.clear()


def test_a_device_version_is_used_while_the_op_is_enabled() -> None:
    @CustomOp.register("double")
    class Double(CustomOp):
        def forward_native(self, x: torch.Tensor) -> str:
            return "native"

        def forward_cpu(self, x: torch.Tensor) -> str:
            return "cpu"

    op = Double()
    assert (op(torch.ones(1)), op(torch.ones(1, device="meta"))) == ("cpu", "native")
    CustomOp.set_enabled("double", False)
    assert not Double.enabled()
    assert op(torch.ones(1)) == "native"
    CustomOp.set_enabled("double", True)
    assert op(torch.ones(1)) == "cpu"
    assert "double" in CustomOp.names()


def test_an_override_is_made_wherever_the_op_is_asked_for() -> None:
    CustomOp.register_override("rms_norm", Mine)
    norm = RMSNorm(4, eps=1e-3)
    assert type(norm) is Mine
    assert norm.eps == 1e-3
    assert not norm(torch.ones(4)).any()
    assert type(GemmaRMSNorm(4)) is GemmaRMSNorm  # another name, another op
    CustomOp.remove_override("rms_norm")
    assert type(RMSNorm(4)) is RMSNorm


def test_an_override_may_be_a_string_and_is_imported_when_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    CustomOp.register_override("rms_norm", "a_third_party:Mine")
    with pytest.raises(PluginError, match="a_third_party"):
        RMSNorm(4)
    module = ModuleType("a_third_party")
    monkeypatch.setitem(sys.modules, "a_third_party", module)
    with pytest.raises(PluginError, match="Mine"):
        RMSNorm(4)
    module.Mine = Mine  # type: ignore[attr-defined]
    assert type(RMSNorm(4)) is Mine


def test_an_override_has_to_be_a_subclass_of_the_op() -> None:
    class Other(CustomOp):
        pass

    CustomOp.register_override("rms_norm", Other)
    with pytest.raises(PluginError, match="not a subclass of RMSNorm"):
        RMSNorm(4)


def test_taken_names_are_conflicts() -> None:
    with pytest.raises(ConflictError, match="rms_norm"):
        CustomOp.register("rms_norm")(Mine)
    CustomOp.register_override("rms_norm", Mine)
    CustomOp.register_override("rms_norm", Mine)
    with pytest.raises(ConflictError, match="override=True"):
        CustomOp.register_override("rms_norm", "x:Y")
    CustomOp.register_override("rms_norm", "x:Y", override=True)


def test_an_unknown_op_cannot_be_switched() -> None:
    with pytest.raises(UnknownNameError, match="rms_norm"):
        CustomOp.set_enabled("rms_nrm", False)


def test_an_op_without_a_plain_version_says_so() -> None:
    class Empty(CustomOp):
        pass

    op: Any = Empty()
    with pytest.raises(NotImplementedError, match="Empty"):
        op(torch.ones(1))
