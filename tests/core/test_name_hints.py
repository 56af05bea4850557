"""Wrapper components, likely prefixes and short summaries of many names."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.checkpoints import llama_shapes
from loadkit.errors import WeightLoadError
from loadkit.name_hints import WRAPPERS, any_wrapped, grouped_names, likely_prefix, strip_wrappers

PLAIN = list(llama_shapes())
COMPONENTS = {part for name in PLAIN for part in name.split(".")}


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda n: "_orig_mod.module." + n, id="NM-06-compiled-ddp"),
        pytest.param(lambda n: "module._orig_mod." + n, id="NM-06-ddp-compiled"),
        pytest.param(lambda n: "module.module." + n, id="NM-06-twice"),
        pytest.param(
            lambda n: n.replace("layers.0.", "layers.0._orig_mod."), id="NM-06-in-the-middle"
        ),
        pytest.param(
            lambda n: n.replace("mlp.", "_fsdp_wrapped_module._checkpoint_wrapped_module.mlp."),
            id="NM-06-fsdp",
        ),
    ],
)
def test_NM_06_wrappers_are_taken_off(wrap, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "loadkit")
    assert list(strip_wrappers(map(wrap, PLAIN), COMPONENTS).values()) == PLAIN
    assert 1 <= len(caplog.records) <= 2, "once per wrapper, not per name"


def test_NM_06_a_model_that_has_such_a_submodule_keeps_it() -> None:
    names = ["_orig_mod.module.w", "module.b"]
    kept = strip_wrappers(names, {"module", "w", "b"})
    assert kept == {"_orig_mod.module.w": "module.w", "module.b": "module.b"}


def test_NM_06_only_whole_components_go_and_never_the_last() -> None:
    assert strip_wrappers(["my_module.w", "module"], set()) == {
        "my_module.w": "my_module.w",
        "module": "module",
    }


def test_NM_06_two_names_that_become_one_are_an_error_naming_both() -> None:
    with pytest.raises(WeightLoadError, match=r"'module\.w' and 'w'"):
        strip_wrappers(["module.w", "w"], set())


def test_names_without_a_wrapper_are_told_at_once() -> None:
    assert not any_wrapped(PLAIN)
    for wrapper in WRAPPERS:
        assert any_wrapped([*PLAIN, f"layers.{wrapper}.w"])


@pytest.mark.parametrize(
    ("prefix", "hint"),
    [
        pytest.param("", "all 20 names match if 'model.' is added", id="NM-02-missing"),
        pytest.param(
            "backbone.",
            "all 20 names match if 'backbone.' is replaced by 'model.'",
            id="NM-02-other",
        ),
        pytest.param(
            "model.model.", "all 20 names match if 'model.' is removed", id="NM-02-doubled"
        ),
        pytest.param(
            "model.language_model.",
            "all 20 names match if 'model.language_model.' is replaced by 'model.'",
            id="NM-02-nested",
        ),
    ],
)
def test_NM_02_the_likely_prefix_is_named(prefix: str, hint: str) -> None:
    names = list(llama_shapes(prefix=prefix, head=False))
    assert len(names) == 20
    assert likely_prefix(names, PLAIN) == hint


def test_NM_02_some_names_are_counted_and_too_few_are_not_likely() -> None:
    names = [name.removeprefix("model.") for name in PLAIN[:6]]
    assert likely_prefix([*names, "x.y", "z.w"], PLAIN) == (
        "6 of 8 names match if 'model.' is added"
    )
    assert likely_prefix([*names[:1], "x.y", "z.w"], PLAIN) is None
    assert likely_prefix(["x.y"], PLAIN) is None
    assert likely_prefix([], PLAIN) is None
    assert likely_prefix(PLAIN, PLAIN) is None


def test_likely_prefix_is_quick_for_many_names() -> None:
    known = [f"model.layers.{i}.mlp.{j}.w" for i in range(100) for j in range(100)]
    hint = likely_prefix([name.removeprefix("model.") for name in known], known)
    assert hint == "all 10000 names match if 'model.' is added"


def test_NM_05_numbered_names_are_one_line() -> None:
    names = [f"layers.{i}.mlp.gate_proj.weight" for i in range(48)]
    assert grouped_names(names) == ["layers 0-47: 48 x mlp.gate_proj.weight"]


def test_NM_05_gaps_experts_singles_and_the_rest() -> None:
    names = [f"m.layers.{i}.experts.{j}.w" for i in (0, 1, 2, 7) for j in range(4)]
    assert grouped_names([*names, "norm.w", "h.3.b"]) == [
        "m.layers 0-2,7: 16 x experts.*.w",
        "norm.w",
        "h.3.b",
    ]
    assert grouped_names([f"x{chr(97 + i)}" for i in range(14)])[-1] == "... and 4 more"


def test_a_name_with_control_characters_is_shown_without_them() -> None:
    [line] = grouped_names(["a\x1b[2Jb"])
    assert "\x1b" not in line


@given(st.lists(st.text(max_size=12), max_size=20))
def test_any_names_can_be_grouped_and_stripped(names: list[str]) -> None:
    assert all(line.isprintable() for line in grouped_names(names))
    likely_prefix(names, ["a.b"])
    with contextlib.suppress(WeightLoadError):
        assert strip_wrappers(set(names), set()).keys() == set(names)
