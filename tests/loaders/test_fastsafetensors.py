"""fastsafetensors: its native calls, direct storage, accelerators."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import loadkit
from helpers.checkpoints import write_llama
from helpers.extents import expected, extent, held
from helpers.sharded import QUIET, same_state
from loadkit.availability import NEEDS_EXTRA, READY
from loadkit.config import LoadConfig
from loadkit.errors import OptionError, ReadError
from loadkit.readers.ranges import Range
from loadkit.sources.local_file import LocalFile
from loadkit_fastsafetensors import availability, engines
from loadkit_fastsafetensors.engines import DirectEngine, Engines
from loadkit_fastsafetensors.reader import AHEAD, FastSafetensorsReader

cpp: Any = pytest.importorskip("fastsafetensors.cpp")


CPU = torch.device("cpu")


@pytest.fixture
def file(tmp_path: Path) -> Iterator[LocalFile]:
    path = tmp_path / "data.bin"
    path.write_bytes(bytes(range(256)) * 400)
    opened = LocalFile("data.bin", str(path))
    yield opened
    opened.close()


def reader(**options: Any) -> FastSafetensorsReader:
    return FastSafetensorsReader(LoadConfig(reader="fastsafetensors", reader_options=options))


def arguments(function: Any) -> list[str]:
    """The names in the signature that a native function shows."""
    first = str(function.__doc__).partition("->")[0]
    return [part.partition(":")[0].strip() for part in first.partition("(")[2].split(",")]


def test_the_calls_are_those_of_the_installed_library() -> None:
    assert arguments(cpp.nogds_file_reader.__init__) == [
        *("self", "use_mmap", "bbuf_size_kb", "max_threads", "use_cuda", "device_id", "numa_node")
    ]
    assert arguments(cpp.nogds_file_reader.submit_read) == [
        *("self", "fd", "dst", "offset", "length", "ptr_off", "track_progress")
    ]
    assert arguments(cpp.gds_file_reader.__init__) == [
        *("self", "max_threads", "use_cuda", "device_id", "block_size", "numa_node")
    ]
    assert arguments(cpp.gds_file_reader.submit_read) == [
        *("self", "fh", "dst", "offset", "length", "ptr_off", "file_length", "track_progress")
    ]
    assert arguments(cpp.gds_file_handle.__init__) == ["self", "arg0", "arg1", "arg2"]
    assert arguments(cpp.gds_device_buffer.__init__) == ["self", "arg0", "arg1", "arg2"]
    gds = pytest.importorskip("fastsafetensors.copier.gds")
    assert callable(gds.init_gds) and callable(gds.load_library_func)


def test_no_more_ranges_are_under_way_than_the_threads_are_worth(
    file: LocalFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = reader(max_threads=2)
    engine: Any = made._engines.of(CPU)
    submit, wait = engine.submit, engine.wait
    under_way = most = 0

    def submitting(item: Range) -> Any:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        return submit(item)

    def waiting(request: Any) -> bool:
        nonlocal under_way
        under_way -= 1
        return bool(wait(request))

    monkeypatch.setattr(engine, "submit", submitting)
    monkeypatch.setattr(engine, "wait", waiting)
    made.read([extent(file, 100 * n, 90) for n in range(100)])
    made.close()
    assert (under_way, most) == (0, 2 * AHEAD)


def test_the_engine_of_direct_storage_reads_into_host_memory_too(file: LocalFile) -> None:
    engine = DirectEngine(cpp, CPU, 2, 1024)
    wanted = extent(file, 5000, 20_000)
    data = Path(file.path).read_bytes()
    request = engine.submit(Range(file, 5000, 20_000, wanted.dest.data_ptr(), wanted, 0, 1))
    assert engine.wait(request)
    assert held(wanted) == expected(data, wanted)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is an accelerator")
def test_direct_storage_without_an_accelerator_is_refused(tmp_path: Path) -> None:
    write_llama(tmp_path)
    for given in (
        {"load_format": "fastsafetensors", "model_loader_extra_config": {"nogds": False}},
        {"reader": "fastsafetensors", "reader_options": {"nogds": False}},
    ):
        with pytest.raises(OptionError, match="needs CUDA"):
            loadkit.plan(tmp_path, load_config=LoadConfig(**given))


def test_direct_storage_without_its_device_node_is_typed_and_opens_no_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gds: Any = pytest.importorskip("fastsafetensors.copier.gds")
    monkeypatch.setattr(gds, "load_library_func", lambda _: None)
    monkeypatch.setattr(gds, "init_gds", lambda _: pytest.fail("the driver was opened"))
    monkeypatch.setattr(engines, "NODE", str(tmp_path / "nvidia-fs0"))
    with pytest.raises(ReadError, match="nvidia-fs0") as caught:
        Engines(2, 1024, gds=True).of(torch.device("cuda:0"))
    assert "nogds" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"max_thread": 8}, "did you mean 'max_threads'"),
        ({"max_threads": 0}, "out of range"),
        ({"bbuf_size_kb": 1}, "out of range"),
        ({"nogds": "yes"}, "nogds = 'yes' is a string"),
    ],
)
def test_CFG_06_keys_are_checked(tmp_path: Path, extra: dict[str, Any], message: str) -> None:
    write_llama(tmp_path)
    given = LoadConfig(load_format="fastsafetensors", model_loader_extra_config=extra)
    with pytest.raises(OptionError, match=message):
        loadkit.plan(tmp_path, load_config=given)


def test_availability_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert availability.state() == READY
    monkeypatch.setattr("loadkit.availability.installed_version", lambda _: None)
    assert availability.state() == NEEDS_EXTRA


# -- with an accelerator ---------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("nogds", [True, False])
def test_ranges_land_on_a_device(file: LocalFile, nogds: bool) -> None:
    if not nogds and not Path(engines.NODE).exists():
        pytest.skip(f"GPU direct storage needs {engines.NODE}")
    made = reader(nogds=nogds)
    wanted = [extent(file, 5, 50_000), extent(file, 60_000, 100, 30, 300, 120)]
    there = [
        type(one)(
            one.file,
            one.offset,
            one.row_bytes,
            one.rows,
            one.file_stride,
            one.dest.to("cuda:0"),
            one.dest_stride,
            one.tensor,
        )
        for one in wanted
    ]
    made.read(there)
    made.close()
    data = Path(file.path).read_bytes()
    for one, other in zip(wanted, there, strict=True):
        assert bytes(other.dest.cpu().numpy()) == expected(data, one)


@pytest.mark.gpu
def test_a_model_lands_on_a_device(tmp_path: Path) -> None:
    write_llama(tmp_path)
    plain = loadkit.load_model(tmp_path, load_config=QUIET, device="cuda:0")
    given = LoadConfig(load_format="fastsafetensors", use_tqdm_on_load=False)
    found = loadkit.load(tmp_path, load_config=given, device="cuda:0")
    assert found.report.bytes_read == found.plan.bytes_to_read
    same_state(found.model.cpu(), plain.cpu())
