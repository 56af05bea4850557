"""A reader's faults are typed errors that say where; short and interrupted reads are not seen."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from helpers.extents import (
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
from loadkit.errors import ChangedError, ReadError, TruncatedError
from loadkit.readers import mmap, runs
from loadkit.readers.base import Extent, Reader
from loadkit.readers.mmap import MmapReader
from loadkit.readers.pread import PreadReader
from loadkit.sources.local_file import LocalFile


@pytest.mark.parametrize("most", [1, 7], ids=["1-byte", "7-bytes"])
def test_short_reads_give_the_same_bytes(
    file: LocalFile, path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    honest = os.preadv

    def short(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return honest(fd, [memoryview(buffers[0])[:most]], offset)

    monkeypatch.setattr(os, "preadv", short)
    extents = [e for e in mixed_extents(file) if e.tensor != "huge"]
    check(PreadReader(LoadConfig()), extents, path.read_bytes())


def test_a_short_vector_read_may_end_inside_any_buffer(
    file: LocalFile, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = os.preadv

    def short(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        room = max(1, sum(map(len, buffers)) * 2 // 3)
        cut: list[memoryview] = []
        for buffer in buffers:
            cut.append(memoryview(buffer)[:room])
            room -= len(cut[-1])
        return honest(fd, [buffer for buffer in cut if len(buffer)], offset)

    monkeypatch.setattr(os, "preadv", short)
    check(PreadReader(LoadConfig()), mixed_extents(file), path.read_bytes())


def test_interrupted_calls_are_invisible(
    file: LocalFile, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, calls = os.preadv, iter(range(10**9))

    def interrupted(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if next(calls) % 6:
            raise InterruptedError(errno.EINTR, "interrupted")
        return honest(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", interrupted)
    check(PreadReader(LoadConfig()), mixed_extents(file), path.read_bytes())


@pytest.mark.parametrize("threads", [1, 4])
def test_an_error_of_the_nth_call_is_raised_for_every_n_until_none_is_left(
    file: LocalFile, path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    small_pieces(monkeypatch, 100_000)
    before = open_descriptors()
    honest = os.preadv
    data = path.read_bytes()
    errors: list[ReadError] = []
    nth = 0
    while True:
        nth += 1
        calls = iter(range(1, 10**9))
        lock = threading.Lock()

        def failing(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            with lock:  # noqa: B023
                call = next(calls)  # noqa: B023
            if call == nth:  # noqa: B023
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return honest(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", failing)
        reader = PreadReader(LoadConfig(num_threads=threads))
        extents = mixed_extents(file)
        try:
            reader.read(extents)
        except ReadError as error:
            errors.append(error)
        else:
            assert [held(e) == expected(data, e) for e in extents] == [True] * len(extents)
            break
        finally:
            reader.close()
    assert nth > 15
    tensors = {e.tensor for e in errors}
    # With several threads it is chance whose call is the nth; alone, every extent's turn comes.
    assert tensors <= {"first", "staged", "vector", "alone", "huge"}
    assert threads > 1 or len(tensors) == 5
    assert {(e.code, e.errno, e.file) for e in errors} == {("E_IO", errno.EIO, "weights.bin")}
    assert [e.offset is not None and str(e.tensor) in str(e) for e in errors] == [True] * len(
        errors
    )
    assert reader_threads() == []
    assert open_descriptors() == before


def test_the_first_error_wins_and_the_rest_is_cancelled(
    file: LocalFile, monkeypatch: pytest.MonkeyPatch
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
    with pytest.raises(ReadError) as caught:
        PreadReader(LoadConfig(num_threads=4)).read([extent(file, 0, 1 << 20)])
    assert caught.value.errno == errno.ENXIO
    assert len(calls) <= 4


def test_an_error_of_the_progress_callback_stops_the_read(reader: Reader, file: LocalFile) -> None:
    def landed(_: int) -> None:
        raise RuntimeError("progress is broken")

    with pytest.raises(RuntimeError, match="progress is broken"):
        reader.read([extent(file, 0, 10)], landed)


@pytest.mark.parametrize("kept", [0, 1, 500, 8005, 8064, 20_000, 120_000, 699_999, 1_019_999])
def test_a_file_cut_at_any_place_is_an_error_that_names_the_tensor(
    tmp_path: Path, kept: int, path: Path
) -> None:
    cut = tmp_path / "cut.bin"
    cut.write_bytes(path.read_bytes())
    opened = LocalFile("cut.bin", str(cut))
    os.truncate(cut, kept)
    reader = PreadReader(LoadConfig(num_threads=2))
    extents = mixed_extents(opened)
    with pytest.raises(TruncatedError) as caught:
        reader.read(extents)
    error = caught.value
    assert (error.code, error.file) == ("E_TRUNCATED", "cut.bin")
    assert error.tensor in {e.tensor for e in extents if _end(e) > kept}
    assert error.offset is not None
    assert error.offset >= kept
    with pytest.raises(ChangedError):
        MmapReader(LoadConfig()).read(extents)
    opened.close()


def _end(wanted: Extent) -> int:
    return wanted.offset + (wanted.rows - 1) * wanted.file_stride + wanted.row_bytes


def test_a_call_that_returns_nothing_early_is_never_taken_for_data(
    file: LocalFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: 0)
    for wanted in mixed_extents(file):
        with pytest.raises(TruncatedError) as caught:
            PreadReader(LoadConfig()).read([wanted])
        assert caught.value.offset == wanted.offset


def test_extents_past_the_end_are_refused_by_both_readers(reader: Reader, file: LocalFile) -> None:
    with pytest.raises(TruncatedError) as caught:
        reader.read([extent(file, SIZE - 10, 11, tensor="last")])
    assert (caught.value.tensor, caught.value.offset) == ("last", SIZE)


def test_a_file_cut_between_the_check_and_the_copy_is_an_error_and_not_a_signal(
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


def test_pages_that_cannot_be_had_are_an_error_and_not_a_signal(
    file: LocalFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mmap, "_populate", lambda address, nbytes: errno.EFAULT)
    with pytest.raises(ReadError) as caught:
        MmapReader(LoadConfig()).read([extent(file, 100, 50, 9, 70, 50, tensor="t")])
    error = caught.value
    assert (error.errno, error.tensor, error.offset) == (errno.EIO, "t", 100)
