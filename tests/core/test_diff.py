"""Comparing two checkpoints: what is the same is said to be, what is not is named."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import loadkit
from helpers.checkpoints import llama_sd, write_llama, write_shards, write_st
from helpers.families import fused
from helpers.gguf_files import lone_llama
from helpers.saving import Tensors
from loadkit.conversion import comparing
from loadkit.errors import ArchitectureError, ChangedError, OptionError


def pair(folder: Path, a: Tensors, b: Tensors) -> tuple[Path, Path]:
    """Two files."""
    return write_st(folder / "a.safetensors", a), write_st(folder / "b.safetensors", b)


def test_the_same_tensors_in_other_files_are_equal(tmp_path: Path) -> None:
    state = write_llama(tmp_path / "a")
    (tmp_path / "b").mkdir()
    write_shards(tmp_path / "b", dict(reversed(state.items())), 3)
    found = loadkit.diff(tmp_path / "a", tmp_path / "b")
    assert found.equal
    assert found.compared == found.a.tensors == found.b.tensors == 21
    assert found.bytes_compared == sum(t.nbytes for t in state.values())
    assert found.names == "checkpoint"


def test_everything_that_differs_is_named(tmp_path: Path) -> None:
    a = {"same": torch.ones(3), "lone": torch.ones(1), "shape": torch.ones(2, 3)}
    a |= {"dtype": torch.ones(4), "values": torch.arange(10.0)}
    b = {**a, "shape": torch.ones(3, 2), "dtype": torch.ones(4).half(), "more": torch.ones(1)}
    b["values"] = a["values"].clone()
    b["values"][7] = 8.0
    del b["lone"]
    found = loadkit.diff(*pair(tmp_path, a, b))
    assert not found.equal
    assert (found.only_in_a, found.only_in_b) == (("lone",), ("more",))
    different = {one.tensor: one for one in found.different}
    assert {name: one.what for name, one in different.items()} == {
        "shape": "shape",
        "dtype": "dtype",
        "values": "values",
    }
    one = different["values"]
    assert (one.differing, one.first, one.max_abs, one.max_rel) == (1, 7, 1.0, 1 / 8)
    assert (different["dtype"].b_dtype, different["dtype"].max_abs) == ("float16", 0.0)
    assert different["shape"].max_abs is None
    assert found.compared == 3


def test_one_bit_counts_and_a_tolerance_allows_it(tmp_path: Path) -> None:
    a = {"x": torch.randn(50, 20), "zero": torch.tensor([0.0, 1.0])}
    b = {"x": a["x"].clone(), "zero": torch.tensor([-0.0, 1.0])}
    b["x"].view(torch.int32)[31, 4] ^= 1
    files = pair(tmp_path, a, b)
    found = loadkit.diff(*files)
    assert {one.tensor: one.first for one in found.different} == {"x": 31 * 20 + 4, "zero": 0}
    zero = next(one for one in found.different if one.tensor == "zero")
    assert (zero.differing, zero.max_abs) == (1, 0.0)  # other bits, the same number
    assert loadkit.diff(*files, tolerance=1e-6).equal
    assert not loadkit.diff(*files, tolerance=0).equal


@pytest.mark.parametrize(
    ("a", "b", "tolerance", "equal"),
    [
        pytest.param(100.0, 100.9, 0.01, True, id="relative-to-large-numbers"),
        pytest.param(100.0, 101.2, 0.01, False, id="beyond"),
        pytest.param(0.001, 0.009, 0.01, True, id="absolute-for-small-ones"),
        pytest.param(math.nan, math.nan, 0, True, id="NaN-and-NaN"),
        pytest.param(math.nan, 1.0, 1e9, False, id="NaN-and-a-number"),
        pytest.param(math.inf, 1.0, 1e9, False, id="infinity-and-a-number"),
        pytest.param(math.inf, math.inf, 0, True, id="infinity-and-infinity"),
        pytest.param(math.inf, -math.inf, 1e9, False, id="the-other-infinity"),
    ],
)
def test_a_tolerance_is_of_the_larger_of_one_and_the_number(
    tmp_path: Path, a: float, b: float, tolerance: float, equal: bool
) -> None:
    files = pair(tmp_path, {"x": torch.tensor([1.0, a])}, {"x": torch.tensor([1.0, b])})
    found = loadkit.diff(*files, tolerance=tolerance)
    assert found.equal is equal
    if not equal and not (math.isfinite(a) and math.isfinite(b)):
        assert found.different[0].max_abs == math.inf


def test_a_cast_is_a_difference_unless_a_tolerance_allows_it(tmp_path: Path) -> None:
    state = llama_sd()
    files = pair(tmp_path, state, {name: t.to(torch.bfloat16) for name, t in state.items()})
    assert {one.what for one in loadkit.diff(*files).different} == {"dtype"}
    assert loadkit.diff(*files, tolerance=2**-8).equal
    assert not loadkit.diff(*files, tolerance=2**-12).equal


def test_dtypes_without_arithmetic_are_compared_by_their_bits(tmp_path: Path) -> None:
    kinds = {
        "f8": torch.randn(8).to(torch.float8_e4m3fn),
        "scale": torch.tensor([1.0, 2.0]).to(torch.float8_e8m0fnu),
        "bool": torch.tensor([True, False]),
        "int": torch.tensor([2**62, 1]),
        "complex": torch.tensor([1 + 2j, 3 + 4j]),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.0),
    }
    other = {name: t.clone() for name, t in kinds.items()}
    assert loadkit.diff(*pair(tmp_path, kinds, other)).equal
    for name in kinds.keys() - {"empty"}:
        changed = other[name].reshape(-1).view(torch.uint8)
        changed[0] ^= 1
        found = loadkit.diff(*pair(tmp_path, kinds, other))
        assert [(one.tensor, one.differing) for one in found.different] == [(name, 1)]
        changed[0] ^= 1


def test_other_ways_of_naming_are_compared_as_the_model_names_them(tmp_path: Path) -> None:
    state = write_llama(tmp_path / "a")
    write_llama(tmp_path / "b")
    write_st(tmp_path / "b/model.safetensors", fused(state))
    assert not loadkit.diff(tmp_path / "a", tmp_path / "b").equal
    found = loadkit.diff(tmp_path / "a", tmp_path / "b", names="model")
    assert (found.equal, found.compared) == (True, 21)


def test_a_gguf_is_compared_with_a_checkpoint_through_the_model(tmp_path: Path) -> None:
    path = lone_llama(tmp_path / "model.gguf")
    loadkit.save(loadkit.load_model(path, dtype="float32"), tmp_path / "b")
    found = loadkit.diff(path, tmp_path / "b", dtype="float32")
    assert found.equal
    assert found.names == "model"
    assert (found.a.load_format, found.b.load_format) == ("gguf", "safetensors")
    assert loadkit.diff(path, path).names == "checkpoint"
    write_st(tmp_path / "lone.safetensors", {"x": torch.ones(1)})
    with pytest.raises(ArchitectureError, match="names='checkpoint'"):
        loadkit.diff(path, tmp_path / "lone.safetensors", names="model", architecture="Nobody")


def test_large_tensors_are_compared_in_slabs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparing, "SLAB", 1000)
    monkeypatch.setattr(comparing, "CHUNK", 64)
    seen: list[int] = []
    real = comparing.read_slabs

    def read_slabs(slabs: Any, reader: Any) -> Any:
        seen.extend(slab.nbytes for slab in slabs)
        return real(slabs, reader)

    monkeypatch.setattr(comparing, "read_slabs", read_slabs)
    a = {"x": torch.randn(1, 100, 16)}
    b = {"x": a["x"].clone()}
    b["x"][0, 93, 5] += 1
    found = loadkit.diff(*pair(tmp_path, a, b))
    assert [(one.differing, one.first) for one in found.different] == [(1, 93 * 16 + 5)]
    assert len(seen) > 10
    assert max(seen) <= 1000


def test_a_file_that_changes_meanwhile_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = pair(tmp_path, llama_sd(), llama_sd())
    real = comparing.read_slabs

    def read_slabs(slabs: Any, reader: Any) -> Any:
        files[1].touch()
        return real(slabs, reader)

    monkeypatch.setattr(comparing, "read_slabs", read_slabs)
    with pytest.raises(ChangedError):
        loadkit.diff(*files)


def test_options_that_cannot_be_are_refused(tmp_path: Path) -> None:
    files = pair(tmp_path, llama_sd(), llama_sd())
    for options in ({"names": "mine"}, {"tolerance": -1.0}, {"tolerance": math.nan}):
        with pytest.raises(OptionError):
            loadkit.diff(*files, **options)
