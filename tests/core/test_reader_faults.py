"""A reader's faults are typed errors that say where; short and interrupted reads are not seen."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

import loadkit
from helpers.checkpoints import write_llama
from helpers.extents import (
    BY_CALLS,
    SIZE,
    check,
    expected,
    extent,
    held,
    mixed_extents,
    open_descriptors,
    reader_threads,
    small_pieces,
)
from loadkit.config import LoadConfig
from loadkit.errors import ChangedError, ReadError, ReadFailure, TruncatedError
from loadkit.readers import mmap, runs
from loadkit.readers.base import Extent, Place, Reader
from loadkit.readers.direct import DirectReader
from loadkit.readers.file_states import FileStates
from loadkit.readers.mmap import MmapReader
from loadkit.readers.pread import PreadReader
from loadkit.sources.local_file import LocalFile

every_reader = pytest.mark.parametrize("kind", BY_CALLS, ids=lambda kind: kind.name)


def shim(monkeypatch: pytest.MonkeyPatch, cut: Callable[[int], int]) -> None:
    """Every read gives ``cut`` of the bytes it could; the rest of its memory is rubbish."""
    honest = os.preadv

    def short(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        got = honest(fd, buffers, offset)
        kept = left = min(got, cut(got))
        for buffer in buffers:
            room = len(buffer)
            if left < room:
                buffer[left:] = b"\x55" * (room - left)
            left = max(0, left - room)
        return kept

    monkeypatch.setattr(os, "preadv", short)


@every_reader
@pytest.mark.parametrize("most", [1, 7], ids=["1-byte", "7-bytes"])
def test_fault_4_short_reads_give_the_same_bytes(
    file: LocalFile, path: Path, monkeypatch: pytest.MonkeyPatch, most: int, kind: type[Reader]
) -> None:
    shim(monkeypatch, lambda got: most)
    wanted = [extent(file, 0, 300), extent(file, 300, 30), extent(file, 8000, 16, 9, 128, 64)]
    check(kind(LoadConfig(num_threads=1)), wanted, path.read_bytes())


@every_reader
def test_fault_4_a_short_vector_read_may_end_inside_any_buffer(
    file: LocalFile, path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Reader]
) -> None:
    shim(monkeypatch, lambda got: max(1, got * 2 // 3))
    check(kind(LoadConfig(num_threads=1)), mixed_extents(file), path.read_bytes())


@every_reader
def test_fault_3_interrupted_calls_are_invisible(
    file: LocalFile, path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Reader]
) -> None:
    honest, calls = os.preadv, iter(range(10**9))

    def interrupted(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if next(calls) % 6:
            raise InterruptedError(errno.EINTR, "interrupted")
        return honest(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", interrupted)
    check(kind(LoadConfig(num_threads=1)), mixed_extents(file), path.read_bytes())


def failing_at(monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    """The nth request for bytes fails, be it a read or the populating of pages."""
    calls, lock = iter(range(1, 10**9)), threading.Lock()
    read, populate = os.preadv, mmap.populate

    def fails() -> bool:
        with lock:
            return next(calls) == nth

    def reading(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if fails():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(fd, buffers, offset)

    def populating(address: int, nbytes: int) -> int:
        return errno.EFAULT if fails() else populate(address, nbytes)

    monkeypatch.setattr(os, "preadv", reading)
    monkeypatch.setattr(mmap, "populate", populating)


@every_reader
@pytest.mark.parametrize("threads", [1, 8])
def test_fault_1_an_error_of_the_nth_call_is_raised_for_every_n_until_none_is_left(
    file: LocalFile, path: Path, threads: int, kind: type[Reader]
) -> None:
    before = open_descriptors()
    data = path.read_bytes()
    errors: list[ReadError] = []
    for nth in range(1, 1000):
        extents = mixed_extents(file)
        reader = kind(LoadConfig(num_threads=threads))
        with pytest.MonkeyPatch.context() as patch:
            small_pieces(patch, 40 << 10)
            failing_at(patch, nth)
            try:
                reader.read(extents)
            except ReadError as error:
                errors.append(error.with_traceback(None))  # frames hold maps
                error.__cause__ = None
            else:
                assert [held(e) == expected(data, e) for e in extents] == [True] * len(extents)
                break
            finally:
                reader.close()
    assert len(errors) > 3
    tensors = {e.tensor for e in errors}
    # With several threads it is chance whose call is the nth; alone, every extent's turn comes.
    assert tensors <= {e.tensor for e in mixed_extents(file)}
    assert threads > 1 or {"first", "huge"} <= tensors
    assert {(e.code, e.errno, e.file) for e in errors} == {("E_IO", errno.EIO, "weights.bin")}
    for error in errors:
        assert error.offset is not None and str(error.tensor) in str(error)
        assert error.hint is not None and "disk" in error.hint
    assert reader_threads() == []
    assert open_descriptors() == before


@pytest.mark.parametrize("reader", ["pread", "mmap", "direct", "eager"])
def test_fault_1_a_model_that_is_loaded_into_is_told_of_and_a_second_try_loads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    write_llama(tmp_path)
    config = LoadConfig(reader=reader, alias="never")
    good = loadkit.load(tmp_path, load_config=config).model
    before = open_descriptors()
    with pytest.MonkeyPatch.context() as patch:
        failing_at(patch, 1)
        with pytest.raises(ReadError) as caught:
            loadkit.load(tmp_path, load_config=config)
    assert caught.value.errno == errno.EIO and caught.value.tensor
    assert open_descriptors() == before and reader_threads() == []
    again = loadkit.load(tmp_path, load_config=config).model
    for name, tensor in good.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


@pytest.mark.parametrize("kind", [PreadReader, DirectReader], ids=lambda kind: kind.name)
def test_fault_39_the_first_error_of_eight_threads_wins_and_the_rest_is_cancelled(
    file: LocalFile, monkeypatch: pytest.MonkeyPatch, kind: type[Reader]
) -> None:
    calls = []

    def failing(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        calls.append(offset)
        if len(calls) == 1:
            raise OSError(errno.ENXIO, "gone")
        time.sleep(0.2)
        raise OSError(errno.EIO, "later")

    monkeypatch.setattr(os, "preadv", failing)
    small_pieces(monkeypatch, 4096)
    reader = kind(LoadConfig(num_threads=8))
    began = time.monotonic()
    with pytest.raises(ReadError) as caught:
        reader.read([extent(file, 0, 1 << 20)])
    assert time.monotonic() - began < 1
    assert caught.value.errno == errno.ENXIO
    assert len(calls) <= 8
    assert reader_threads() == []
    reader.close()


def test_an_error_of_the_progress_callback_stops_the_read(reader: Reader, file: LocalFile) -> None:
    def landed(_: int) -> None:
        raise RuntimeError("progress is broken")

    with pytest.raises(RuntimeError, match="progress is broken"):
        reader.read([extent(file, 0, 10)], landed)


@every_reader
@pytest.mark.parametrize("kept", [0, 1, 500, 8005, 8064, 20_000, 120_000, 699_999, 1_019_999])
def test_fault_8_a_file_cut_at_any_place_is_an_error_that_names_the_tensor(
    tmp_path: Path, kept: int, path: Path, kind: type[Reader]
) -> None:
    cut = tmp_path / "cut.bin"
    cut.write_bytes(path.read_bytes())
    opened = LocalFile("cut.bin", str(cut))
    os.truncate(cut, kept)
    reader = kind(LoadConfig(num_threads=2))
    extents = mixed_extents(opened)
    with pytest.raises(ReadFailure) as caught:
        reader.read(extents)
    error = caught.value
    assert error.file == "cut.bin"
    if kind is MmapReader:  # it looks before it maps
        assert isinstance(error, ChangedError)
    else:
        assert isinstance(error, TruncatedError)
        assert error.tensor in {e.tensor for e in extents if _end(e) > kept}
        assert error.offset is not None
        assert error.offset >= kept
    reader.close()
    opened.close()


def _end(wanted: Extent) -> int:
    return wanted.offset + (wanted.rows - 1) * wanted.file_stride + wanted.row_bytes


@pytest.mark.parametrize("reader", ["auto", "pread", "mmap", "direct", "eager"])
@pytest.mark.parametrize("dtype", ["auto", "float64"], ids=["copied", "cast"])
def test_fault_8_a_file_cut_after_its_header_was_read_ends_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str, dtype: str
) -> None:
    write_llama(tmp_path)
    weights = max(tmp_path.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    plain = loadkit.loader.read_turns  # type: ignore[attr-defined]

    def cutting(*args: object, **more: object) -> object:
        os.truncate(weights, weights.stat().st_size // 2)
        return plain(*args, **more)

    monkeypatch.setattr(loadkit.loader, "read_turns", cutting)  # type: ignore[attr-defined]
    with pytest.raises((ChangedError, TruncatedError)) as caught:
        loadkit.load(tmp_path, dtype=dtype, load_config=LoadConfig(reader=reader))
    assert caught.value.file == weights.name


@pytest.mark.parametrize("reader", ["auto", "pread", "mmap", "direct", "eager"])
def test_fault_9_a_rewrite_after_the_load_does_not_change_owned_tensors(
    tmp_path: Path, reader: str
) -> None:
    write_llama(tmp_path)
    model = loadkit.load(tmp_path, load_config=LoadConfig(reader=reader, alias="never")).model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for weights in tmp_path.glob("*.safetensors"):
        with weights.open("r+b") as opened:
            size = weights.stat().st_size
            opened.seek(size // 2)
            opened.write(b"\xff" * (size - size // 2))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


@every_reader
def test_fault_5_a_call_that_returns_nothing_early_is_never_taken_for_data(
    file: LocalFile, monkeypatch: pytest.MonkeyPatch, kind: type[Reader]
) -> None:
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: 0)
    for wanted in mixed_extents(file):
        if kind is MmapReader and wanted.tensor in ("staged", "vector", "alone"):
            continue  # copied from the map
        reader = kind(LoadConfig())
        with pytest.raises(TruncatedError) as caught:
            reader.read([wanted])
        assert caught.value.offset is not None
        assert wanted.offset - 4096 < caught.value.offset <= wanted.offset
        assert caught.value.tensor == wanted.tensor
        reader.close()


@every_reader
def test_extents_past_the_end_are_refused_by_every_reader(
    file: LocalFile, kind: type[Reader]
) -> None:
    reader = kind(LoadConfig())
    with pytest.raises(TruncatedError) as caught:
        reader.read([extent(file, SIZE - 10, 11, tensor="last")])
    assert (caught.value.tensor, caught.value.offset) == ("last", SIZE)
    reader.close()


@every_reader
def test_what_lies_past_the_end_is_told_by_where_the_file_ends(
    tmp_path: Path, path: Path, kind: type[Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = tmp_path / "cut.bin"
    cut.write_bytes(path.read_bytes())
    opened = LocalFile("cut.bin", str(cut))
    reader = kind(LoadConfig())
    monkeypatch.setattr(opened, "check_unchanged", lambda: None)  # it is cut just after that
    os.truncate(cut, SIZE // 2)
    wanted = extent(opened, SIZE - 4096, 4096, tensor="last")
    with pytest.raises(TruncatedError, match=f"ends at byte {SIZE // 2}") as caught:
        reader.read([wanted])
    assert (caught.value.tensor, caught.value.offset) == ("last", SIZE // 2)
    reader.close()
    opened.close()


def test_fault_8_a_file_cut_between_the_check_and_the_copy_is_an_error_and_not_a_signal(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = tmp_path / "cut.bin"
    cut.write_bytes(path.read_bytes())
    opened = LocalFile("cut.bin", str(cut))
    reader = MmapReader(LoadConfig(num_threads=1))
    honest = opened.check_unchanged
    tasks = runs.tasks

    def cutting(
        extents: Sequence[Extent], rows_of: Callable[[Extent], Iterator[Callable[[], int]]]
    ) -> Iterator[Callable[[], int]]:
        for task in tasks(extents, rows_of):
            yield task
            os.truncate(cut, 8192)

    monkeypatch.setattr(runs, "tasks", cutting)
    with pytest.raises(TruncatedError):
        reader.read(mixed_extents(opened))
    with pytest.raises(ChangedError):
        honest()
    opened.close()


def test_fault_1_pages_that_cannot_be_had_are_an_error_and_not_a_signal(
    file: LocalFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mmap, "populate", lambda address, nbytes: errno.EFAULT)
    reader = MmapReader(LoadConfig(), FileStates(local=lambda file: True))
    place = Place(file, 100, 50, 9, 70, "t")
    for act in (
        lambda: reader.read([extent(file, *place[1:5], 50, "t")]),
        lambda: reader.bring(place),
    ):
        with pytest.raises(ReadError) as caught:
            act()
        error = caught.value
        assert (error.errno, error.tensor, error.offset) == (errno.EIO, "t", 100)


@pytest.mark.parametrize("kind", [PreadReader, DirectReader, MmapReader], ids=lambda k: k.name)
def test_fault_44_a_slow_disk_is_waited_for_and_read_in_file_order(
    file: LocalFile, path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Reader]
) -> None:
    honest, seen, lock = os.preadv, [], threading.Lock()

    def slow(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with lock:
            seen.append(offset)
        time.sleep(0.002)
        return honest(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", slow)
    small_pieces(monkeypatch, 32 << 10)
    check(kind(LoadConfig(num_threads=1)), [extent(file, 0, 2 << 20)], path.read_bytes())
    assert len(seen) == 64 and seen == sorted(seen)
