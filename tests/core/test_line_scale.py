"""Plans at real scale, from headers alone: a made-up 405B Llama whose files are holes."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import loadkit
from helpers.checkpoints import llama_shapes, write_sparse_llama
from loadkit.config import ParallelConfig
from loadkit.readers.mmap import MmapReader
from loadkit.sources.local import LocalFile

TENSORS = 1137
SIZES = {
    "layers": 126, "hidden": 16384, "heads": 128, "kv_heads": 8, "ffn": 53248, "vocab": 128256,
}  # fmt: skip


@pytest.fixture(scope="module")
def llama_405b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama405b")
    names = write_sparse_llama(folder, files=64, **SIZES)
    assert len(names) == TENSORS and len(set(names.values())) == 64
    return folder


def test_all_eight_ranks_of_a_405b_are_planned_without_a_weight_byte(
    llama_405b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int, int]] = []
    read = LocalFile.read

    def counting(file: LocalFile, offset: int, nbytes: int) -> bytes:
        seen.append((file.name, offset, nbytes))
        return read(file, offset, nbytes)

    def no_read(*args: object) -> int:
        raise AssertionError("weights were read")

    def no_view(self: MmapReader, file: LocalFile, offset: int, nbytes: int) -> torch.Tensor:
        assert nbytes == 0  # it only maps the file
        return view(self, file, offset, nbytes)

    view = MmapReader.view
    monkeypatch.setattr(LocalFile, "read", counting)
    monkeypatch.setattr(os, "preadv", no_read)
    monkeypatch.setattr(MmapReader, "view", no_view)
    began = time.process_time()
    plans = [
        loadkit.plan(llama_405b, parallel=ParallelConfig(tp_size=8, tp_rank=at)) for at in range(8)
    ]
    assert time.process_time() - began < 20
    assert all(plan.ok for plan in plans)
    for name, offset, nbytes in seen:
        if name.endswith(".safetensors"):
            with (llama_405b / name).open("rb") as file:
                header = int.from_bytes(file.read(8), "little")
            assert offset + nbytes <= 8 + header, (name, offset, nbytes)
    shapes = llama_shapes(**SIZES)
    total = sum(math.prod(shape) * 2 for shape in shapes.values())  # bf16
    norms = sum(math.prod(shape) * 2 for name, shape in shapes.items() if "norm" in name)
    assert total > 800e9
    assert sum(plan.bytes_needed for plan in plans) == total + 7 * norms
    assert all(plan.data_read_bytes == 0 for plan in plans)
    tensors = {row.tensor for plan in plans for row in plan.rows if row.tensor}
    assert len(tensors) == TENSORS
    assert {row.exact for plan in plans for row in plan.rows} == {"exact"}


# VmHWM begins anew with a program; ru_maxrss would count what its parent held.
PLAN_ALL = """
import sys, loadkit
from pathlib import Path
for at in range(8):
    assert loadkit.plan(sys.argv[1], parallel=loadkit.ParallelConfig(tp_size=8, tp_rank=at)).ok
status = Path("/proc/self/status").read_text()
print(int(status.partition("VmHWM:")[2].split()[0]) << 10)
"""


@pytest.mark.slow
def test_eight_plans_of_a_405b_fit_into_a_gibibyte(llama_405b: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLAN_ALL, llama_405b], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 1.2 * (1 << 30)


def test_layers_that_the_model_does_not_have_are_told_in_linear_time(tmp_path: Path) -> None:
    count = 6000
    tensors = {f"body.{i}.weight": torch.zeros(1) for i in range(count)}
    save_file(tensors, tmp_path / "weights.safetensors")
    module = nn.Module()
    module.body = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(count // 2))
    began = time.process_time()
    with pytest.raises(loadkit.PlanError) as caught:
        loadkit.load_into(module, tmp_path / "weights.safetensors")
    assert time.process_time() - began < 15  # 1.3 on an idle machine; 70 when it was quadratic
    assert len(caught.value.problems) == count // 2
    assert "'body' has no '3000'; it has 0, 1, 10, 100, " in caught.value.problems[0].message


def test_names_that_all_miss_are_told_in_linear_time(tmp_path: Path) -> None:
    """A wrong prefix over thousands of tensors: each missing name was compared with each stray."""
    count = 4000
    tensors = {f"trunk.{i}.weight": torch.zeros(1) for i in range(count)}
    save_file(tensors, tmp_path / "weights.safetensors")
    module = nn.Module()
    module.body = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(count))
    began = time.process_time()
    with pytest.raises(loadkit.PlanError) as caught:
        loadkit.load_into(module, tmp_path / "weights.safetensors")
    assert time.process_time() - began < 20  # 1.3 on an idle machine; 250 when it was quadratic
    codes = [problem.code for problem in caught.value.problems]
    assert codes == ["UNEXPECTED_TENSOR"] * count + ["MISSING"] * count
    first = caught.value.problems[0]
    assert first.hint == f"all {count} names match if 'trunk.' is replaced by 'body.'"
