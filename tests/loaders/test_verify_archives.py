"""``loadkit verify`` of formats whose archives keep a CRC-32 of every record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import loadkit
from helpers.dcp_files import write_dcp

WEIGHTS = {"a.weight": torch.arange(4096.0).view(64, 64), "b.weight": torch.full((300,), 2.5)}


def _dcp(folder: Path) -> Path:
    write_dcp(folder, {"model": WEIGHTS, "optim": {"a": torch.ones(9)}, "step": 3})
    return folder / "__0_0.distcp"


def _pt(folder: Path) -> Path:
    folder.mkdir()
    torch.save(WEIGHTS, folder / "pytorch_model.bin")
    return folder / "pytorch_model.bin"


@pytest.mark.parametrize("write", [_dcp, _pt])
def test_an_archive_vouches_for_itself(write: Callable[[Path], Path], tmp_path: Path) -> None:
    file = write(tmp_path / "m")
    report = loadkit.verify(tmp_path / "m")
    assert report.ok
    assert {check.name: check.ok for check in report.checks} == {"headers": True, "digests": True}
    found = report.files[file.name]
    assert (found["vouched"], found["sha256"]) == ("the archive itself", None)

    data = bytearray(file.read_bytes())
    at = data.index(WEIGHTS["b.weight"].numpy().tobytes())
    data[at + 5] ^= 1
    file.write_bytes(data)
    report = loadkit.verify(tmp_path / "m")
    assert not report.ok
    (problem,) = report.problems
    assert (problem.code, problem.file) == ("DIGEST", file.name)
    assert "crc32" in problem.message and f"bytes {at} to {at + 1200}" in problem.message
    assert problem.hint


def test_an_archive_without_checksums_vouches_for_nothing(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        _pt(tmp_path / "m")
    finally:
        torch.serialization.set_crc32_options(before)
    report = loadkit.verify(tmp_path / "m")
    assert report.ok
    assert [check.ok for check in report.checks if check.name == "digests"] == [None]
