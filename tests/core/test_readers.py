"""Readers give the file's bytes and nothing else, and count what they said they would."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.extents import (
    READERS,
    SIZE,
    check,
    content,
    expected,
    extent,
    held,
    reader_threads,
    small_pieces,
    surveyed,
)
from loadkit.config import LoadConfig
from loadkit.readers import runs
from loadkit.readers.base import Extent, Place, Reader
from loadkit.readers.mmap import MmapReader
from loadkit.readers.pread import PreadReader
from loadkit.readers.rows import GAP, SPAN
from loadkit.readers.runs import LONG_ROW
from loadkit.sources.local_file import LocalFile


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int, int, int]:
    """offset, row_bytes, rows, file_stride, dest_stride of an extent inside SIZE bytes."""
    near = st.integers(0, 70)
    row_bytes = draw(st.one_of(near, st.sampled_from([LONG_ROW - 1, LONG_ROW, LONG_ROW + 8, 9000])))
    rows = draw(st.integers(0, 60))
    gap = draw(st.one_of(st.just(0), near, st.sampled_from([-8, GAP - 1, GAP, GAP + 1, 30_000])))
    file_stride = max(0, row_bytes + gap)
    dest_gap = draw(st.one_of(st.just(0), st.integers(0, 40)))
    room = SIZE - (max(0, rows - 1) * file_stride + row_bytes)
    offset = draw(st.integers(0, min(room, 5000)) if room > 0 else st.just(0))
    if room < 0:
        rows = 1
    return offset, row_bytes, rows, file_stride, row_bytes + dest_gap


@given(drawn=st.lists(shapes(), max_size=6))
def test_the_requests_foretold_are_the_calls_made(
    drawn: list[tuple[int, int, int, int, int]], file: LocalFile
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        small_pieces(patch, 100_000)
        calls = count_calls(patch)
        reader = PreadReader(LoadConfig(num_threads=2))
        extents = [extent(file, *shape) for shape in sorted(drawn)]
        foretold = surveyed(reader, extents)
        reader.read(extents)
    assert foretold.requests == len(calls)


@given(drawn=st.lists(shapes(), max_size=6), kind=st.sampled_from(READERS))
def test_any_extents_give_the_files_bytes_and_the_counts_foretold(
    drawn: list[tuple[int, int, int, int, int]], kind: type[Reader], file: LocalFile, path: Path
) -> None:
    reader = kind(LoadConfig(num_threads=2))
    check(reader, [extent(file, *shape) for shape in sorted(drawn)], path.read_bytes())
    reader.close()


@pytest.mark.parametrize("row_bytes", [2, 64, LONG_ROW, 12_000])
@pytest.mark.parametrize("gap", [0, 6, GAP, GAP + 1])
def test_rows_that_fill_many_spans_are_right_and_counted(
    reader: Reader, row_bytes: int, gap: int, file: LocalFile, path: Path
) -> None:
    rows = (SIZE - 1) // (row_bytes + gap)
    check(reader, [extent(file, 1, row_bytes, rows, row_bytes + gap, row_bytes)], path.read_bytes())


def test_gaps_within_a_span_count_and_gaps_between_spans_do_not(file: LocalFile) -> None:
    stride = 1024
    per_span = SPAN // stride

    def of(kind: type[Reader], row_bytes: int, rows: int, stride: int) -> tuple[int, int]:
        return kind(LoadConfig()).survey([Place(file, 0, row_bytes, rows, stride)])

    assert of(PreadReader, 512, per_span, stride) == (per_span * stride - 512, 1)
    assert of(PreadReader, 512, per_span + 1, stride) == (per_span * stride, 2)
    assert of(PreadReader, 512, 7, 512 + GAP + 1) == (7 * 512, 7)
    assert of(PreadReader, SPAN, 7, SPAN + 1) == (7 * SPAN, 7)
    assert of(PreadReader, 512, 0, stride) == of(PreadReader, 0, 5, stride) == (0, 0)
    assert of(MmapReader, 512, 7, stride) == (7 * 512, 1)


def test_touching_neighbours_are_read_by_one_call_into_several_tensors(
    file: LocalFile, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_calls(monkeypatch)
    extents = [extent(file, 100 + 40 * n, 40, tensor=f"t{n}") for n in range(30)]
    assert surveyed(PreadReader(LoadConfig()), extents) == (30 * 40, 1)
    check(PreadReader(LoadConfig()), extents, path.read_bytes())
    assert len(calls) == 1
    extents = [extent(file, 50 * n, 40) for n in range(30)]
    check(PreadReader(LoadConfig()), extents, path.read_bytes())
    assert len(calls) == 1 + 30


def test_one_call_never_gets_more_buffers_than_the_system_takes(
    file: LocalFile, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_calls(monkeypatch)
    check(PreadReader(LoadConfig()), [extent(file, n, 1) for n in range(3000)], path.read_bytes())
    assert len(calls) == -(-3000 // runs.PARTS)
    assert max(calls) <= os.sysconf("SC_IOV_MAX")


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of buffers of each call of os.preadv from here on."""
    calls: list[int] = []
    honest = os.preadv

    def counting(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        calls.append(len(buffers))
        return honest(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", counting)
    return calls


def test_threads_share_one_large_extent(tmp_path: Path, reader: Reader) -> None:
    big = tmp_path / "big.bin"
    big.write_bytes(data := content(2 * runs.PIECE + 77))
    with_file = LocalFile("big.bin", str(big))
    seen: set[int] = set()
    wanted = extent(with_file, 5, 2 * runs.PIECE + 70)

    def landed(_: int) -> None:
        seen.add(threading.get_ident())
        time.sleep(0.02)

    assert reader.read([wanted], landed) == surveyed(reader, [wanted]).nbytes
    assert held(wanted) == expected(data, wanted)
    assert len(seen) > 1
    assert reader_threads() == []
    with_file.close()


def test_a_destination_may_start_at_any_byte_of_a_tensor(
    reader: Reader, file: LocalFile, path: Path
) -> None:
    memory = torch.full((5000,), 0xAA, dtype=torch.uint8)
    wanted = Extent(file, 3, 16, 100, 48, memory[7:], 40, "t")
    check(reader, [wanted], path.read_bytes())
    assert bytes(memory[:7].numpy()) == b"\xaa" * 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dest": torch.empty(9, dtype=torch.uint8)}, "needs 10 bytes"),
        ({"dest": torch.empty(10, dtype=torch.int8)}, "1-d uint8 CPU"),
        ({"dest": torch.empty((10, 1), dtype=torch.uint8)}, "1-d uint8 CPU"),
        ({"dest": torch.empty(10, dtype=torch.uint8, device="meta")}, "1-d uint8 CPU"),
        ({"dest": torch.empty(20, dtype=torch.uint8)[::2]}, "not neighbours"),
        ({"rows": 2, "dest_stride": 4}, "overlap in memory"),
        ({"rows": 2, "row_bytes": 5, "dest_stride": 5, "file_stride": -5}, "backwards"),
        ({"offset": -1}, "negative"),
    ],
    ids=["short", "dtype", "2d", "meta", "strided", "overlap", "backwards", "offset"],
)
def test_an_extent_that_does_not_fit_its_destination_is_refused_before_any_read(
    reader: Reader, file: LocalFile, changes: dict[str, object], message: str
) -> None:
    values: dict[str, object] = {
        "file": file,
        "offset": 0,
        "row_bytes": 10,
        "rows": 1,
        "file_stride": 10,
        "dest": torch.zeros(10, dtype=torch.uint8),
        "dest_stride": 10,
        "tensor": "t",
    }
    good = extent(file, 0, 10)
    with pytest.raises(ValueError, match=message):
        reader.read([good, Extent(**{**values, **changes})])  # type: ignore[arg-type]
    assert held(good) == b"\xaa" * 10
