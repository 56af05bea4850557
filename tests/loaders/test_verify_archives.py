"""``loadkit verify`` of formats whose files keep checksums of their own bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import loadkit
from helpers.checkpoints import write_llama
from helpers.dcp_files import write_dcp
from helpers.digests import corrupt
from helpers.sharded import ranks_of

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


@pytest.mark.parametrize("tp", [1, 2])
def test_tensorizer_files_vouch_for_themselves(tmp_path: Path, tp: int) -> None:
    """At any topology: rank files that nothing puts together are looked at one by one."""
    pytest.importorskip("tensorizer")
    write_llama(tmp_path / "a")
    for parallel in ranks_of(tp_size=tp):
        model = loadkit.load_model(tmp_path / "a", parallel=parallel)
        loadkit.save(model, tmp_path / "b", save_format="tensorizer")
    file = max((tmp_path / "b").glob("*.tensors"))
    report = loadkit.verify(tmp_path / "b", finite=True)
    assert report.ok, report.problems
    assert all(check.ok for check in report.checks)
    assert report.tensors == (21 if tp == 1 else 2 * len(list(model.parameters())))
    assert report.files[file.name]["vouched"] == "the tensor's own header"

    norm = dict(model.named_parameters())["model.norm.weight"].detach().numpy().tobytes()
    corrupt(file, file.read_bytes().index(norm) + 5)
    (problem,) = loadkit.verify(tmp_path / "b").problems
    assert (problem.code, problem.file) == ("DIGEST", file.name)
