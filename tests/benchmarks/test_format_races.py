"""The races of formats give both sides the same work, and every claim is about rows there are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import generate, gguf_export, pt_format
from benchmarks.format_races import FORMAT_RACES
from benchmarks.generate import TOY, written
from benchmarks.run_all import BENCHMARKS


@pytest.fixture(autouse=True)
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A toy's folder, in a cache of the test's own."""
    monkeypatch.setattr(generate, "CACHE", tmp_path / "bench")
    monkeypatch.setattr(pt_format, "CACHES", tmp_path / "numpy")
    return written(TOY)


@pytest.mark.parametrize("kind", gguf_export.KINDS)
def test_gguf_py_writes_the_bytes_that_loadkit_writes(tmp_path: Path, toy: Path, kind: str) -> None:
    pytest.importorskip("gguf")
    plain, like, to = (str(tmp_path / f"{name}.gguf") for name in ("plain", "like", "to"))
    gguf_export.ours(str(toy), gguf_export.PLAIN, plain)()
    gguf_export.ours(str(toy), kind, like)()
    gguf_export.gguf_py(plain, like, to)()
    assert _tensors(to) == _tensors(like)


def _tensors(path: str) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    data = Path(path).read_bytes()
    found = gguf_export._header(path).tensors
    return [(t.name, t.dtype, t.shape, data[t.offset : t.offset + t.nbytes]) for t in found]


def test_both_readers_of_a_gguf_file_end_with_the_same_numbers(tmp_path: Path, toy: Path) -> None:
    pytest.importorskip("gguf")
    from benchmarks import gguf_packed

    path = str(tmp_path / "model.gguf")
    gguf_export.ours(str(toy), "Q8_0", path)()
    theirs = gguf_export.decoded_by_gguf_py(path)()
    mine = list(gguf_packed.loadkit(path)().parameters())
    # rows of q and k are permuted in the file, and of the rest some are fused
    assert _numbers(mine) == pytest.approx(_numbers(theirs), rel=1e-6)


def _numbers(tensors: list[torch.Tensor]) -> tuple[int, float]:
    with torch.no_grad():
        return sum(t.numel() for t in tensors), float(sum(t.double().abs().sum() for t in tensors))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda at: pt_format.by_torch(at), id="torch"),
        pytest.param(lambda at: pt_format.by_torch(at, mmap=True), id="torch-mapped"),
        pytest.param(lambda at: pt_format.by_loadkit(at, "pt"), id="pt"),
        pytest.param(lambda at: pt_format.by_loadkit(at, "npcache"), id="npcache"),
    ],
)
def test_every_way_to_an_archive_fills_the_same_module(
    toy: Path, make: Callable[[str], Callable[[], Any]]
) -> None:
    from safetensors.torch import load_file

    made = make(str(pt_format.archived(TOY)))()
    model = made[0] if isinstance(made, tuple) else made
    state = model.state_dict()
    for path in toy.glob("*.safetensors"):
        for name, tensor in load_file(str(path)).items():
            assert torch.equal(state.pop(name), tensor), name
    assert set(state) == {"lm_head.weight"}  # tied


def test_numpy_reads_the_files_that_npcache_made(toy: Path) -> None:
    files = pt_format.cache_files(pt_format.archived(TOY))
    held = sum(tensor.nbytes for tensor in pt_format.by_numpy([str(path) for path in files])())
    weights = sum(path.stat().st_size for path in toy.glob("*.safetensors"))
    assert len(files) == 1
    assert 0.8 * weights < held < 1.2 * weights


def test_every_load_format_with_a_library_has_a_race() -> None:
    raced = {"bitsandbytes", "gguf-load", "gguf-export", "npcache", "pt", "s3", "tensorizer"}
    assert raced <= set(FORMAT_RACES) <= set(BENCHMARKS)
    assert {"libraries", "presharded"} <= set(BENCHMARKS)  # runai, fastsafetensors; sharded_state
