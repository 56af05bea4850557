"""``ReaderContract``: what everything that moves bytes owes a load, as tests."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from loadkit import tables
from loadkit.config import LoadConfig
from loadkit.errors import ReadFailure
from loadkit.readers.base import Extent, Place, Reader
from loadkit.readers.pages import PAGE, reserve
from loadkit.sources.base import File
from loadkit.sources.local_file import LocalFile
from loadkit.testing.loader_case import fail
from loadkit.testing.watching import left_behind

__all__ = ["ReaderContract"]

_SIZE = 300_007  # of the file: no multiple of a page
_GUARD = 0xA5  # what memory holds that nothing may write to

# offset, row_bytes, rows, file_stride, bytes between rows in memory
_SHAPES = {
    "one byte": (0, 1, 1, 1, 0),
    "the whole file": (0, _SIZE, 1, _SIZE, 0),
    "its last byte": (_SIZE - 1, 1, 1, 1, 0),
    "an odd piece": (4097, 8191, 1, 8191, 0),
    "rows with gaps": (3, 64, 200, 100, 0),
    "rows that touch": (8, 256, 100, 256, 0),
    "long rows far apart": (1, 20_000, 5, 60_000, 0),
    "rows into rows": (16, 48, 300, 480, 7),
    "no rows": (5, 16, 0, 16, 0),
    "empty rows": (5, 0, 3, 16, 0),
}


class ReaderContract:
    """Subclass it and name the reader; override ``open`` for files that are not local.

    Attributes:
        reader: its name in the table of readers.
        load_options: fields of ``LoadConfig``.
    """

    reader: ClassVar[str] = ""
    load_options: ClassVar[dict[str, Any]] = {}

    def open(self, path: Path) -> File:
        """A file of bytes, as the reader gets it."""
        return LocalFile(path.name, str(path))

    def make(self) -> Reader:
        """A reader."""
        cls: Any = tables.readers.lookup(self.reader)
        made: Reader = cls(LoadConfig(reader=self.reader, num_threads=2, **self.load_options))
        return made

    @pytest.fixture(autouse=True)
    def _file(self, tmp_path: Path) -> Iterator[None]:
        generator = torch.Generator().manual_seed(0)
        self.content = bytes(
            torch.randint(0, 256, (_SIZE,), dtype=torch.uint8, generator=generator).tolist()
        )
        self.path = tmp_path / "data.bin"
        self.path.write_bytes(self.content)
        self.file = self.open(self.path)
        yield
        close = getattr(self.file, "close", None)
        if callable(close):
            close()

    @pytest.mark.parametrize("shape", _SHAPES.values(), ids=_SHAPES.keys())
    def test_an_extent_gets_the_files_bytes_and_nothing_else_is_touched(
        self, shape: tuple[int, int, int, int, int]
    ) -> None:
        self._check([self._extent(*shape)])

    def test_many_extents_at_once_get_theirs(self) -> None:
        shapes = sorted(_SHAPES.values())
        self._check([self._extent(*shape, tensor=f"t{n}") for n, shape in enumerate(shapes)])

    def test_a_survey_reads_nothing_and_says_what_is_read(self) -> None:
        reader = self.make()
        extents = [self._extent(*shape) for shape in sorted(_SHAPES.values())]
        foretold = reader.survey(_places(extents))
        told: list[int] = []
        read = reader.read(extents, told.append)
        reader.close()
        if foretold.nbytes != read or sum(told) != read:
            fail(f"{foretold.nbytes} bytes foretold, {read} read, {sum(told)} told as landed")

    def test_nothing_to_do_reads_nothing(self) -> None:
        reader = self.make()
        if reader.survey([]).nbytes or reader.read([]):
            fail("it read something")
        reader.close()

    def test_a_file_that_ended_early_is_an_error_that_names_the_tensor(self) -> None:
        with self.path.open("r+b") as file:
            file.truncate(_SIZE - 3000)
        self.file = self.open(self.path)
        extent = self._extent(_SIZE - 5000, 4000, 1, 4000, 0, tensor="layers.3.weight")
        reader = self.make()
        with pytest.raises(ReadFailure) as caught:
            reader.read([extent])
        reader.close()
        error = caught.value
        if error.tensor != "layers.3.weight" or error.file is None or error.offset is None:
            fail(f"tensor {error.tensor!r}, file {error.file!r}, offset {error.offset!r}: {error}")

    def test_a_reader_that_was_closed_leaves_no_file_open_and_no_thread(self) -> None:
        warm = self.make()
        warm.read([self._extent(0, 4096, 1, 4096, 0)])
        warm.close()
        extents = [self._extent(*shape) for shape in sorted(_SHAPES.values())]
        with left_behind(self.path.parent) as left:
            reader = self.make()
            reader.read(extents)
            reader.close()
            reader.close()
            del reader
            gc.collect()
        if left.files or left.threads:
            fail(f"open {left.files}, running {left.threads}")

    def test_several_threads_may_read_if_it_says_so(self) -> None:
        reader = self.make()
        if not reader.concurrent:
            reader.close()
            pytest.skip("the reader is not concurrent")
        extents = [self._extent(1000 * n, 900, 1, 900, 0) for n in range(40)]
        threads = [threading.Thread(target=reader.read, args=([one],)) for one in extents]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        reader.close()
        for extent in extents:
            self._compare(extent)

    def test_a_view_is_the_files_bytes_and_changing_it_leaves_the_file(self) -> None:
        reader = self.make()
        if not reader.aliases:
            reader.close()
            pytest.skip("the reader does not alias")
        view = reader.view(self.file, 4097, 8191)
        if bytes(view.tolist()) != self.content[4097 : 4097 + 8191]:
            fail("the view shows other bytes")
        view.fill_(0)
        if self.path.read_bytes() != self.content:
            fail("changing a view changed the file")
        del view
        reader.close()

    def test_pages_of_a_file_stand_in_memory_and_nothing_beside_them_changes(self) -> None:
        reader = self.make()
        if not reader.overlays:
            reader.close()
            pytest.skip("the reader puts no pages of files into memory")
        memory = reserve(4 * PAGE, 0).fill_(_GUARD)
        reader.overlay(self.file, PAGE, memory[PAGE : 3 * PAGE])
        reader.close()
        self.file.close()
        around = bytes([_GUARD]) * PAGE
        if bytes(memory.tolist()) != around + self.content[PAGE : 3 * PAGE] + around:
            fail("the memory holds other bytes")
        memory.fill_(0)
        if self.path.read_bytes() != self.content:
            fail("changing the memory changed the file")

    # -- inside ------------------------------------------------------------------------------------

    def _extent(
        self, offset: int, row_bytes: int, rows: int, stride: int, gap: int, tensor: str = "t"
    ) -> Extent:
        room = max(1, max(0, rows - 1) * (row_bytes + gap) + row_bytes)
        dest = torch.full((room,), _GUARD, dtype=torch.uint8)
        return Extent(self.file, offset, row_bytes, rows, stride, dest, row_bytes + gap, tensor)

    def _check(self, extents: Sequence[Extent]) -> None:
        reader = self.make()
        foretold = reader.survey(_places(extents))
        read = reader.read(extents)
        reader.close()
        if read != foretold.nbytes:
            fail(f"{foretold.nbytes} bytes foretold, {read} read")
        for extent in extents:
            self._compare(extent)

    def _compare(self, extent: Extent) -> None:
        expected = bytearray([_GUARD]) * extent.dest.numel()
        for row in range(extent.rows):
            start = extent.offset + row * extent.file_stride
            at = row * extent.dest_stride
            expected[at : at + extent.row_bytes] = self.content[start : start + extent.row_bytes]
        if bytes(extent.dest.tolist()) != bytes(expected):
            fail(f"other bytes than the file's at offset {extent.offset}")


def _places(extents: Sequence[Extent]) -> list[Place]:
    return [Place(e.file, e.offset, e.row_bytes, e.rows, e.file_stride, e.tensor) for e in extents]
