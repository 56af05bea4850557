"""The reader of ranges: what it asks for, where it lands, and how it ends."""

from __future__ import annotations

import threading

import pytest
import torch

from loadkit.config import LoadConfig
from loadkit.errors import DownloadError
from loadkit.readers.base import Extent, Place
from loadkit.readers.range import GAP, REQUEST, RangeReader
from loadkit.sources.base import File


class Far(File):
    """A file that is nowhere here; notes what is asked for."""

    def __init__(self, data: bytes, name: str = "far.bin") -> None:
        self.name, self.data, self.size = name, data, len(data)
        self.asked: list[tuple[int, int]] = []
        self.fails_at: int | None = None
        self.memory: list[int] = []
        self._lock = threading.Lock()

    def read(self, offset: int, nbytes: int) -> bytes:
        with self._lock:
            self.asked.append((offset, nbytes))
        if self.fails_at is not None and offset <= self.fails_at < offset + nbytes:
            raise DownloadError("no", file=self.name, offset=self.fails_at)
        return self.data[offset : offset + nbytes]

    def read_into(self, offset: int, into: memoryview) -> None:
        super().read_into(offset, into)
        self.memory.append(torch.frombuffer(into, dtype=torch.uint8).data_ptr())

    def check_unchanged(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def far() -> Far:
    size = 3 * REQUEST + 12345
    return Far(torch.randint(0, 256, (size,), dtype=torch.uint8).numpy().tobytes())


def extent(file: File, offset: int, nbytes: int, rows: int = 1, stride: int = 0) -> Extent:
    dest = torch.zeros(rows * nbytes, dtype=torch.uint8)
    return Extent(file, offset, nbytes, rows, stride or nbytes, dest, nbytes, f"t{offset}")


def landed(item: Extent) -> bytes:
    return bytes(item.dest.numpy())


def wanted(file: Far, item: Extent) -> bytes:
    places = (item.offset + row * item.file_stride for row in range(item.rows))
    return b"".join(file.data[at : at + item.row_bytes] for at in places)


def test_small_gaps_are_fetched_along_and_large_ones_asked_around(far: Far) -> None:
    near = [extent(far, 0, 1000), extent(far, 1000 + GAP - 1, 1000)]
    apart = [extent(far, 500_000, 1000), extent(far, 501_000 + GAP, 1000)]
    reader = RangeReader(LoadConfig(num_threads=1))
    items = near + apart
    survey = reader.survey([Place(*_place(item)) for item in items])
    assert reader.read(items) == survey.nbytes == 2000 + GAP - 1 + 2000
    assert survey.requests == 3
    assert far.asked == [(0, 1999 + GAP), (500_000, 1000), (501_000 + GAP, 1000)]
    assert [landed(item) for item in items] == [wanted(far, item) for item in items]


def _place(item: Extent) -> tuple[File, int, int, int, int, str]:
    return item.file, item.offset, item.row_bytes, item.rows, item.file_stride, item.tensor


def test_a_long_extent_goes_straight_into_its_memory_in_parts(far: Far) -> None:
    item = extent(far, 77, 2 * REQUEST + 5)
    reader = RangeReader(LoadConfig(num_threads=3))
    counts: list[int] = []
    assert reader.read([item], counts.append) == item.row_bytes == sum(counts)
    assert sorted(far.asked) == [(77, REQUEST), (77 + REQUEST, REQUEST), (77 + 2 * REQUEST, 5)]
    start = item.dest.data_ptr()
    assert sorted(far.memory) == [start, start + REQUEST, start + 2 * REQUEST]
    assert landed(item) == wanted(far, item)


@pytest.mark.parametrize("stride", [3000, 3000 + GAP])
def test_rows_with_gaps_land_where_they_belong(far: Far, stride: int) -> None:
    item = extent(far, 11, 1000, rows=100, stride=stride)
    reader = RangeReader(LoadConfig())
    survey = reader.survey([Place(*_place(item))])
    assert reader.read([item]) == survey.nbytes
    assert len(far.asked) == survey.requests == (1 if stride < GAP else 100)
    assert landed(item) == wanted(far, item)
    assert reader.buffer_bytes() == 8 * REQUEST


def test_files_are_not_mixed_up(far: Far) -> None:
    other = Far(bytes(reversed(far.data)), "other.bin")
    items = [extent(far, 5, 100), extent(far, 300, 100), extent(other, 5, 100)]
    RangeReader(LoadConfig()).read(items)
    assert [landed(item) for item in items] == [wanted(far, i) for i in items[:2]] + [
        wanted(other, items[2])
    ]


def test_an_error_says_which_tensor_and_ends_the_rest(far: Far) -> None:
    items = [extent(far, at * 200_000, 1000) for at in range(50)]
    far.fails_at = 400_500
    before = threading.active_count()
    with pytest.raises(DownloadError) as caught:
        RangeReader(LoadConfig(num_threads=2)).read(items)
    error = caught.value
    assert (error.tensor, error.file, error.offset) == ("t400000", "far.bin", 400_500)
    assert len(far.asked) < 10
    assert threading.active_count() == before
