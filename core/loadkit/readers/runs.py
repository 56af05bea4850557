"""Runs: bytes that are neighbours in the file, read in place by ``preadv``.

Runs that touch in one file share a call, also across extents and into different destinations.
What is no run (short rows with gaps) is each reader's own: ``tasks`` and ``survey`` are told how.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from loadkit.errors import ReadError, TruncatedError
from loadkit.readers.base import Extent, Place, Survey
from loadkit.readers.extents import buffer_at
from loadkit.readers.threads import Task
from loadkit.text import printable

if TYPE_CHECKING:
    from loadkit.sources.base import File

__all__ = ["LONG_ROW", "PARTS", "PIECE", "fill", "pull", "survey", "tasks", "what_to_do"]

PIECE = 8 << 20  # bytes of one task
LONG_ROW = 4 << 10  # touching rows from here on land in place; shorter ones are staged or copied
HUGE_ROW = 256 << 10  # such a row is a run of its own
PARTS = max(16, min(1024, os.sysconf("SC_IOV_MAX")))  # buffers of one preadv

# Part of a run: the address its bytes go to, how many, and the extent they belong to.
Part = tuple[int, int, Extent]


def tasks(extents: Sequence[Extent], rows_of: Callable[[Extent], Iterator[Task]]) -> Iterator[Task]:
    """The work in file order, made as it is drawn; ``rows_of`` gives that of rows with gaps."""
    runs = _Runs()
    for extent in extents:
        if not extent.rows or not extent.row_bytes:
            continue
        if _lands_in_runs(extent):
            yield from runs.add(extent)
        else:
            yield from runs.flush()
            yield from rows_of(extent)
    yield from runs.flush()


def survey(places: Iterable[Place], rows_of: Callable[[Place], Survey]) -> Survey:
    """What ``tasks`` would read; ``rows_of`` surveys rows with gaps."""
    nbytes = requests = 0
    runs = _Count()
    for place in places:
        if not place.rows or not place.row_bytes:
            continue
        if _lands_in_runs(place):
            nbytes += place.rows * place.row_bytes
            runs.add(place)
        else:
            runs.file = None
            more = rows_of(place)
            nbytes += more.nbytes
            requests += more.requests
    return Survey(nbytes, requests + runs.requests)


def _lands_in_runs(item: Extent | Place) -> bool:
    """Whether the bytes go in place, run by run. Told from the file's side alone."""
    if item.rows == 1 or item.row_bytes >= HUGE_ROW:
        return True
    return item.file_stride == item.row_bytes and item.row_bytes >= LONG_ROW


class _Count:
    """Counts the calls of ``_Runs`` without its parts."""

    def __init__(self) -> None:
        self.requests = 0
        self.file: File | None = None
        self.end = self.held = self.parts = 0

    def add(self, place: Place) -> None:
        """Count a place that lands in runs."""
        stride = place.file_stride
        for row in range(place.rows):
            offset, left = place.offset + row * stride, place.row_bytes
            if place.file is not self.file or offset != self.end:
                self.held, self.parts = PIECE, 0  # nothing can be added to it
            self.file, self.end = place.file, offset + left
            if self.held == PIECE or self.parts == PARTS:
                self.requests, self.held, self.parts = self.requests + 1, 0, 0
            rest = left - (PIECE - self.held)
            if rest > 0:
                more = -(-rest // PIECE)
                self.requests += more
                self.held, self.parts = rest - (more - 1) * PIECE, 1
            else:
                self.held, self.parts = self.held + left, self.parts + 1


class _Runs:
    """Gathers parts that touch in one file into tasks of at most ``PIECE`` bytes."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.offset = 0
        self.nbytes = 0

    def add(self, extent: Extent) -> Iterator[Task]:
        """Take an extent that lands in runs; gives the tasks that became full."""
        for address, offset, nbytes in _runs(extent):
            yield from self._add(extent, address, offset, nbytes)

    def _add(self, extent: Extent, address: int, offset: int, nbytes: int) -> Iterator[Task]:
        while nbytes:
            touches = (
                bool(self.parts)
                and self.parts[0][2].file is extent.file
                and self.offset + self.nbytes == offset
            )
            if not touches or self.nbytes == PIECE or len(self.parts) == PARTS:
                yield from self.flush()
                self.offset = offset
            taken = min(nbytes, PIECE - self.nbytes)
            self.parts.append((address, taken, extent))
            self.nbytes += taken
            address, offset, nbytes = address + taken, offset + taken, nbytes - taken

    def flush(self) -> Iterator[Task]:
        """The task of what was gathered, if anything was."""
        if self.parts:
            yield partial(_read_run, self.offset, self.parts)
        self.parts, self.nbytes = [], 0


def _runs(extent: Extent) -> Iterator[tuple[int, int, int]]:
    """Address, file offset and size of each run."""
    address = extent.dest.data_ptr()
    for row in range(extent.rows):
        place = address + row * extent.dest_stride
        yield place, extent.offset + row * extent.file_stride, extent.row_bytes


def _read_run(offset: int, parts: list[Part]) -> int:
    buffers = [buffer_at(address, nbytes) for address, nbytes, _ in parts]
    owners = [extent for _, _, extent in parts]
    return fill(owners[0].file, offset, buffers, owners)


def fill(
    file: File,
    offset: int,
    buffers: list[memoryview],
    owners: Sequence[Extent] | Callable[[int], Extent],
    *,
    done: int = 0,
) -> int:
    """Fill all buffers from one place of the file on; short reads are continued.

    ``owners`` says whose bytes they are, for errors: of each buffer, or of an offset of the file.
    The first ``done`` bytes are there already.
    """
    start, at, got = offset, 0, done
    while True:
        offset += got
        while at < len(buffers) and got >= len(buffers[at]):
            got -= len(buffers[at])
            at += 1
        if at == len(buffers):
            return offset - start
        if got:
            buffers[at] = buffers[at][got:]
        owner = owners(offset) if callable(owners) else owners[at]
        got = pull(file, offset, buffers[at:] if at else buffers, owner)


def pull(
    file: File,
    offset: int,
    buffers: Sequence[memoryview],
    owner: Extent,
    *,
    descriptor: int | None = None,
) -> int:
    """One read: at least a byte, or a typed error. ``descriptor``: another one of the file."""
    while True:
        try:
            if file.path is None:
                data = file.read(offset, len(buffers[0]))
                got = len(data)
                buffers[0][:got] = data
            else:
                number = file.fileno() if descriptor is None else descriptor
                got = os.preadv(number, buffers, offset)
        except InterruptedError:
            continue
        except OSError as error:
            raise ReadError(
                f"reading tensor {printable(owner.tensor)} from {printable(file.name)} at byte "
                f"{offset} failed: {error.strerror or error}",
                errno=error.errno,
                file=file.name,
                tensor=owner.tensor,
                offset=offset,
                hint=what_to_do(error.errno, direct=descriptor is not None),
            ) from error
        if got:
            return got
        end = offset if file.path is None else min(offset, os.fstat(file.fileno()).st_size)
        where = "inside" if end == offset else f"before byte {offset} of"
        raise TruncatedError(
            f"{printable(file.name)} ends at byte {end}, {where} tensor "
            f"{printable(owner.tensor)}; it had {file.size} bytes when it was opened",
            file=file.name,
            tensor=owner.tensor,
            offset=end,
            hint="the file is incomplete or was cut while in use; copy or download it again",
        )


def what_to_do(number: int | None, *, direct: bool = False) -> str:
    """What helps against a failed read."""
    if direct and number in (errno.EINVAL, errno.EOPNOTSUPP):
        return "its file system has no O_DIRECT: choose the reader 'auto' or 'pread'"
    if number == errno.ESTALE:
        return "the server has another file under this name now: load again"
    return "the disk or the mount is at fault: see the system's log, and copy the file again"
