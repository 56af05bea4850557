"""Checking a checkpoint's files: everything that is wrong is found and named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import loadkit
from helpers.checkpoints import write_index, write_llama, write_st
from loadkit.verify import VerifyReport


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A converted folder of several files."""
    write_llama(tmp_path / "a")
    loadkit.convert(tmp_path / "a", tmp_path / "b", max_shard_bytes=8_000)
    return tmp_path / "b"


def codes(report: VerifyReport) -> set[str]:
    return {problem.code for problem in report.problems}


def words(report: VerifyReport) -> dict[str, bool | None]:
    return {check.name: check.ok for check in report.checks}


def test_what_convert_writes_is_vouched_for_to_the_last_byte(made: Path) -> None:
    report = loadkit.verify(made, finite=True, against=made.parent / "a")
    assert report.ok, report.problems
    assert words(report) == dict.fromkeys(
        ["files", "headers", "tensors", "digests", "finite", "against"], True
    )
    assert (report.layout, report.tensors) == ("checkpoint", 21)
    assert all(file["vouched"] == "loadkit_manifest.json" for file in report.files.values())
    assert len(report.files) == len(list(made.glob("*.safetensors")))


def flip(folder: Path) -> None:
    path = folder / "model-00002-of-00004.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


def cut(folder: Path) -> None:
    path = folder / "model-00003-of-00004.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def lose(folder: Path) -> None:
    (folder / "model-00001-of-00004.safetensors").unlink()


def exchange(folder: Path) -> None:
    first, second = (folder / f"model-0000{n}-of-00004.safetensors" for n in (1, 2))
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)


def misname(folder: Path) -> None:
    write_index(folder, {"model.norm.weight": "model-00001-of-00004.safetensors"})


def garble(folder: Path) -> None:
    (folder / "loadkit_manifest.json").write_text("{")


@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        (flip, {"DIGEST"}),
        (cut, {"SIZE", "LAYOUT", "DIGEST"}),
        (lose, {"MISSING_FILE", "INDEX"}),
        (misname, {"INDEX"}),
        (garble, {"MANIFEST"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_was_harmed_is_found(
    made: Path, harm: Callable[[Path], None], expected: set[str]
) -> None:
    harm(made)
    report = loadkit.verify(made)
    assert not report.ok
    assert codes(report) == expected
    assert all(problem.message for problem in report.problems)


def test_files_that_changed_places_are_found(made: Path) -> None:
    exchange(made)
    found = codes(loadkit.verify(made))
    assert {"DIGEST", "INDEX"} <= found


def test_a_checkpoint_of_others_has_nobody_to_vouch_for_it(tmp_path: Path) -> None:
    write_llama(tmp_path, shards=2)
    report = loadkit.verify(tmp_path)
    assert report.ok
    assert words(report) == {"headers": True, "digests": None}
    assert len(report.files) == 2


def test_numbers_that_are_not_finite_are_counted(tmp_path: Path) -> None:
    state = {
        "good": torch.ones(3),
        "bad": torch.tensor([[float("nan"), 1.0], [float("inf"), float("-inf")]]),
        "half": torch.tensor([float("nan")]).half(),
        "f8": torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn),
        "int": torch.arange(4),
    }
    path = write_st(tmp_path / "x.safetensors", state)
    assert loadkit.verify(path).ok
    report = loadkit.verify(path, finite=True)
    told = {problem.tensor: problem.message for problem in report.problems}
    assert told.keys() == {"bad", "half", "f8"}
    assert "1 NaN and 2 infinite" in told["bad"]
    assert codes(report) == {"NOT_FINITE"}


def test_another_checkpoint_that_differs_is_a_problem(tmp_path: Path) -> None:
    state = write_llama(tmp_path / "a")
    state["model.norm.weight"] = state["model.norm.weight"] + 1e-3
    write_llama(tmp_path / "b")
    write_st(tmp_path / "b/model.safetensors", state)
    report = loadkit.verify(tmp_path / "b", against=tmp_path / "a")
    assert [(p.code, p.tensor) for p in report.problems] == [("DIFFERENT", "model.norm.weight")]
    assert loadkit.verify(tmp_path / "b", against=tmp_path / "a", tolerance=1e-2).ok
