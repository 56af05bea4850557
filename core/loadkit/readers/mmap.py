"""The reader that maps files: parameters become views, and strided rows are copied from the map.

Runs are read as ``pread`` reads them: as fast as a copy from the map, and safe. So are rows that
lie further apart than ``NEAR`` (a page fault would read what is between them), and everything that
is no view on a file system that is not local: a fault inside a copy may block there for good. Views
of cold files are asked for in advance, byte for byte: faults would read megabytes around them,
which belong to other ranks (eighths of 8 MiB tensors: 64 MiB from the disk in place of 511).

A mapping is private (writes to a view never reach the file) and is unmapped when the reader and the
last view have let go of it, never earlier. Before rows are copied, or worked on in a view, their
pages are populated: a page that cannot be had is then an error code and not a SIGBUS. A file that
is cut in the moment between that call and the copy still kills the process, as does touching a view
of a file that was cut; the ``pread`` reader is for files that others write.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from loadkit.available_memory import available_memory
from loadkit.errors import ChangedError, ReadError, TruncatedError
from loadkit.readers import runs
from loadkit.readers.base import Extent, Place, Reader, Survey
from loadkit.readers.extents import check_extent, copy_rows
from loadkit.readers.file_states import FileStates, announce, will_need
from loadkit.readers.pages import PAGE, can_put_pages, populate, put_pages
from loadkit.readers.rows import RowReads
from loadkit.readers.runs import PIECE, what_to_do
from loadkit.readers.threads import Task, run_tasks, threads_for
from loadkit.text import printable

if TYPE_CHECKING:
    from loadkit.config import LoadConfig
    from loadkit.sources.base import File

__all__ = ["MmapReader"]

NEAR = 128 << 10  # rows whose gap is at most this are populated together and copied


class MmapReader(Reader):
    """Maps each file once. ``read`` uses two threads unless ``num_threads`` says otherwise.

    A Python before 3.13 keeps one more descriptor per mapped file for as long as it is mapped.
    """

    name: ClassVar[str] = "mmap"
    aliases: ClassVar[bool] = True
    overlays: ClassVar[bool] = can_put_pages()
    concurrent: ClassVar[bool] = True

    def __init__(self, load_config: LoadConfig, states: FileStates | None = None) -> None:
        super().__init__(load_config)
        self._threads = threads_for(load_config, most=2)
        self._states = states or FileStates()
        self._rows = RowReads(self._states)
        self._expected = 0  # bytes of views that are to come
        self._refused = False  # a mapping by the system
        self._maps: dict[int, _Map] = {}
        self._lock = threading.Lock()

    def survey(self, places: Iterable[Place]) -> Survey:
        return runs.survey(places, self._survey_rows)

    def maps(self, place: Place | Extent) -> bool:
        near = place.rows == 1 or place.file_stride - place.row_bytes <= NEAR
        return near and self._states.is_local(place.file)

    def bring(self, place: Place) -> None:
        if place.rows and place.row_bytes:
            self._map(place.file).populate(place.offset, _end(place) - place.offset, place)

    def expect_view(self, file: File, offset: int, nbytes: int) -> None:
        self._expected += nbytes

    def view(self, file: File, offset: int, nbytes: int) -> torch.Tensor:
        """A uint8 view [nbytes] of the file's private mapping, with a storage of its own.

        Its first byte lies in memory as it lies in the file: aligned to what ``offset`` is.
        Nothing is read until it is touched; a view of nothing only maps the file.

        Raises:
            TruncatedError: the file ends before ``offset + nbytes``.
            ChangedError: the file was changed since it was opened.
            ReadError: the file cannot be mapped.
        """
        if offset < 0 or nbytes < 0:
            raise ValueError(f"no view of {nbytes} bytes at {offset}")
        mapped = self._map(file)
        mapped.check(offset + nbytes, None)
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        self._announce_view(file, offset, nbytes)
        return torch.frombuffer(mapped.memory[offset : offset + nbytes], dtype=torch.uint8)

    def overlay(self, file: File, offset: int, into: torch.Tensor) -> None:
        """Have whole pages of memory be a private mapping of the file.

        Where the system refuses one mapping more (it has a limit of them), the pages are read.

        Raises:
            ValueError: it is no whole pages.
            MemoryError: a refusal took the memory away.
            TruncatedError: the file ends before the last byte.
            ChangedError: the file was changed since it was opened.
            ReadError: the pages could be neither mapped nor read.
        """
        nbytes = into.numel()
        if offset % PAGE or nbytes % PAGE or into.data_ptr() % PAGE:
            raise ValueError(f"{nbytes} bytes at {offset} are no whole pages")
        self._map(file).check(offset + nbytes, None)
        number = put_pages(into, file.fileno(), offset)
        if not number:
            self._announce_view(file, offset, nbytes)
            return
        if not self._refused:
            self._refused = True
            self.remarks.append(
                f"{printable(file.name)} and others are read where they should be mapped: "
                f"{os.strerror(number)}"
            )
        self.read([Extent(file, offset, nbytes, 1, nbytes, into, nbytes, "")])

    def _announce_view(self, file: File, offset: int, nbytes: int) -> None:
        if self._states.is_cold(file) and self._have_room(nbytes):
            will_need(file, offset, nbytes)

    @cached_property
    def _room(self) -> int | None:
        return available_memory()

    def _have_room(self, nbytes: int) -> bool:
        """Whether what is viewed fits into memory beside what is there."""
        return self._room is None or max(self._expected, nbytes) <= self._room

    def read(self, extents: Sequence[Extent], landed: Callable[[int], None] | None = None) -> int:
        """Fill every destination; ``landed`` gets counts that sum up to the result.

        The result counts the rows, not the gaps between them.

        Raises:
            ValueError: an extent does not fit its destination; nothing was read.
            TruncatedError: a file ended early.
            ChangedError: a file was changed since it was opened.
            ReadError: a file cannot be mapped, or the operating system failed.
        """
        wanted = spanned = 0
        checked: set[int] = set()
        for extent in extents:
            check_extent(extent)
            if id(extent.file) not in checked:
                checked.add(id(extent.file))
                extent.file.check_unchanged()
            if extent.rows and extent.row_bytes:
                self._map(extent.file).check(_end(extent), extent)
                wanted += extent.rows * extent.row_bytes
                spanned += _end(extent) - extent.offset
        if not wanted:
            return 0
        announce(extents, self._states)
        threads = min(self._threads, -(-spanned // PIECE))
        return run_tasks(runs.tasks(extents, self._rows_of), threads, landed)

    def close(self) -> None:
        """Let go of the mappings. Those that views still use stay until the last view is gone."""
        self._maps.clear()
        self._rows.close()

    def _map(self, file: File) -> _Map:
        with self._lock:
            if id(file) not in self._maps:
                self._maps[id(file)] = _Map(file)
            return self._maps[id(file)]

    def _survey_rows(self, place: Place) -> Survey:
        """Rows with gaps; one request populates the pages of a task."""
        if not self.maps(place):
            return self._rows.survey(place)
        return Survey(place.rows * place.row_bytes, -(-place.rows // _rows_per_task(place)))

    def _rows_of(self, extent: Extent) -> Iterator[Task]:
        """The work of rows with gaps."""
        if not self.maps(extent):
            yield from self._rows.tasks(extent)
            return
        mapped = self._map(extent.file)
        step = _rows_per_task(extent)
        for first in range(0, extent.rows, step):
            yield partial(_copy, mapped, extent, first, min(step, extent.rows - first))


def _rows_per_task(item: Extent | Place) -> int:
    return max(1, PIECE // max(item.file_stride, item.row_bytes))


class _Map:
    """One file's mapping. ``memory`` is a buffer of it, ``address`` its first byte."""

    def __init__(self, file: File) -> None:
        self.file = file
        self.memory = memoryview(b"")
        self.address = 0
        try:
            size = os.fstat(file.fileno()).st_size
            if size:
                self.memory = memoryview(_map_private(file.fileno(), size))
        except (OSError, ValueError, OverflowError, NotImplementedError) as error:
            number = error.errno if isinstance(error, OSError) else errno.ENODEV
            raise ReadError(
                f"{printable(file.name)} cannot be mapped: {error}",
                errno=number,
                file=file.name,
                hint="choose the reader 'pread'",
            ) from error
        if size:
            self.address = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()

    def check(self, end: int, owner: Extent | Place | None) -> None:
        """Raise unless the file still holds the bytes up to ``end``, and the map does."""
        found = os.fstat(self.file.fileno()).st_size
        tensor = owner.tensor if owner else None
        if end > found:
            what = f" (tensor {printable(tensor)})" if tensor is not None else ""
            raise TruncatedError(
                f"{printable(self.file.name)} ends at byte {found}; byte {end - 1} was asked "
                f"for{what}; it had {self.file.size} bytes when it was opened",
                file=self.file.name,
                tensor=tensor,
                offset=found,
            )
        if end > len(self.memory):
            raise ChangedError(
                f"{printable(self.file.name)} grew from {len(self.memory)} to {found} bytes "
                "while it was in use",
                file=self.file.name,
                tensor=tensor,
            )

    def populate(self, offset: int, nbytes: int, owner: Extent | Place) -> None:
        """Have the pages of these bytes in memory, or raise."""
        number = populate(self.address + offset, nbytes)
        if not number:
            return
        self.check(offset + nbytes, owner)
        number = errno.EIO if number == errno.EFAULT else number
        raise ReadError(
            f"reading tensor {printable(owner.tensor)} from {printable(self.file.name)} at byte "
            f"{offset} failed: {os.strerror(number)}",
            errno=number,
            file=self.file.name,
            tensor=owner.tensor,
            offset=offset,
            hint=what_to_do(number),
        )


def _map_private(fd: int, size: int) -> mmap.mmap:
    """A private, writable mapping of the whole file, not charged against free memory."""
    flags = mmap.MAP_PRIVATE
    if sys.platform == "linux" and os.uname().machine in ("x86_64", "aarch64"):
        flags |= 0x4000  # MAP_NORESERVE
    more: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
    return mmap.mmap(fd, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE, **more)


def _end(extent: Extent | Place) -> int:
    return extent.offset + (extent.rows - 1) * extent.file_stride + extent.row_bytes


def _copy(mapped: _Map, extent: Extent, first: int, rows: int) -> int:
    """Copy rows ``first`` to ``first + rows``."""
    row_bytes, stride = extent.row_bytes, extent.file_stride
    offset = extent.offset + first * stride
    mapped.check(offset + (rows - 1) * stride + row_bytes, extent)
    mapped.populate(offset, (rows - 1) * stride + row_bytes, extent)
    into = extent.dest.data_ptr() + first * extent.dest_stride
    copy_rows(mapped.address + offset, stride, into, extent.dest_stride, row_bytes, rows)
    return row_bytes * rows
