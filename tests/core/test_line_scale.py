"""Plans at real scale, from headers alone: a made-up 405B Llama whose files are holes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import loadkit
from helpers.checkpoints import llama_shapes, write_sparse_llama
from loadkit.config import ParallelConfig
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

    monkeypatch.setattr(LocalFile, "read", counting)
    plans = [
        loadkit.plan(llama_405b, parallel=ParallelConfig(tp_size=8, tp_rank=at)) for at in range(8)
    ]
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
