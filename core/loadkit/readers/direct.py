"""The reader that goes past the page cache: ``O_DIRECT`` into aligned memory, a few threads.

The file is taken in windows that begin and end on blocks, so blocks at the borders of what is
wanted are read whole and count whole; only the file's last block may be a part of one. A window
lands in an aligned buffer of its thread and is handed on from there. Where memory lies as the file
does (both addresses equal modulo a block), the whole blocks of a run land in place, in the same
request.

Nothing is left in the page cache: another rank, or the next load, reads from the disk again.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch

from loadkit.errors import ReadError
from loadkit.readers.base import Extent, Place, Reader, Survey
from loadkit.readers.extents import buffer_at, check_extent
from loadkit.readers.runs import fill, pull
from loadkit.readers.threads import Task, run_tasks
from loadkit.readers.windows import by_file, meeting, merged, owner_at, scatter, spans
from loadkit.text import printable

if TYPE_CHECKING:
    from loadkit.config import LoadConfig
    from loadkit.sources.base import File

__all__ = ["BLOCK", "GAP", "WINDOW", "DirectReader", "takes_direct"]

BLOCK = 4096  # bytes; a multiple of every disk's logical block
WINDOW = 4 << 20  # bytes of one request, and of a thread's buffer
GAP = 128 << 10  # a gap up to this is read: as dear as one more request
IN_PLACE = 64 << 10  # bytes that are worth a piece of their own in a request
THREADS = 4  # they wait for the disk: more than CPUs do no harm

# A piece of a window that lands in place: from and to which byte of the file, and the address.
_Place = tuple[int, int, int]


class DirectReader(Reader):
    """Reads local files by ``O_DIRECT``. Every fault is a typed error.

    Uses ``num_threads`` threads (0: four), each with one buffer of ``WINDOW`` bytes that is kept
    until ``close``, as is one descriptor per file.
    """

    name: ClassVar[str] = "direct"
    concurrent: ClassVar[bool] = True

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        self._threads = load_config.num_threads or THREADS
        self._buffers: list[mmap.mmap] = []
        self._lock = threading.Lock()
        self._descriptors: dict[int, int] = {}
        self._finalizer = weakref.finalize(self, _close_all, self._descriptors)

    def survey(self, places: Iterable[Place]) -> Survey:
        nbytes = requests = 0
        for part in by_file(places):
            file = part[0].file
            self._open(file)
            for start, end in _windows(part):
                nbytes += min(end, file.size) - start
                requests += 1
        return Survey(nbytes, requests)

    def read(self, extents: Sequence[Extent], landed: Callable[[int], None] | None = None) -> int:
        """Fill every destination; ``landed`` gets counts that sum up to the result.

        Raises:
            ValueError: an extent does not fit its destination; nothing was read.
            TruncatedError: a file ended early.
            ReadError: the operating system failed, or a file system has no ``O_DIRECT``.
        """
        for extent in extents:
            check_extent(extent)
        wanted = sum(extent.rows * extent.row_bytes for extent in extents)
        threads = min(self._threads, -(-wanted // WINDOW))
        return run_tasks(self._tasks(extents), threads, landed)

    def close(self) -> None:
        """Close the descriptors and let the buffers go."""
        self._buffers.clear()
        _close_all(self._descriptors)

    def _tasks(self, extents: Sequence[Extent]) -> Iterator[Task]:
        for part in by_file(extents):
            file = part[0].file
            descriptor = self._open(file)
            for start, end, inside in meeting(part, _windows(part)):
                yield partial(self._window, file, descriptor, start, end, inside)

    def _open(self, file: File) -> int:
        with self._lock:
            if id(file) not in self._descriptors:
                self._descriptors[id(file)] = _open_direct(file)
            return self._descriptors[id(file)]

    def _window(
        self, file: File, descriptor: int, start: int, end: int, inside: Sequence[Extent]
    ) -> int:
        """Read one window and hand it on."""
        try:
            memory = self._buffers.pop()
        except IndexError:  # all are in use, in this thread or in others
            memory = mmap.mmap(-1, WINDOW, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
            pieces = _in_place(inside, start, end)
            buffers = _layout(address, start, end, pieces)
            needed = min(end, max(_end(extent) for extent in inside)) - start
            owners = partial(owner_at, inside)
            got = pull(file, start, buffers, owners(start), descriptor=descriptor)
            if got < needed:  # cut short, maybe inside a block: go on as others read
                fill(file, start, _first(buffers, needed), owners, done=got)
            at = start
            for low, high, _ in (*pieces, (end, end, 0)):
                if at < low:
                    scatter(address + at - start, at, low, inside)
                at = high
        finally:
            self._buffers.append(memory)
        return min(end, file.size) - start


def takes_direct(file: File) -> bool:
    """Whether a file can be read by ``O_DIRECT``; its first block is read to know."""
    try:
        descriptor = _open_direct(file)
    except ReadError:
        return False
    try:
        with mmap.mmap(-1, BLOCK) as memory:
            os.preadv(descriptor, [memory], 0)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _open_direct(file: File) -> int:
    """A second descriptor of an open file, for ``O_DIRECT``."""
    flag = getattr(os, "O_DIRECT", 0)
    if file.path is None or not flag:
        why = "it is not a local file" if file.path is None else "this system has no O_DIRECT"
        raise _no_direct(file, why, errno.EOPNOTSUPP)
    try:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW | flag
        descriptor = os.open(file.path, flags)
    except OSError as error:
        file.check_unchanged()  # a file that went away is another error
        raise _no_direct(file, error.strerror or str(error), error.errno) from error
    mine, other = os.fstat(descriptor), os.fstat(file.fileno())
    if (mine.st_dev, mine.st_ino) != (other.st_dev, other.st_ino):
        os.close(descriptor)
        file.check_unchanged()
        raise _no_direct(file, "it was replaced", errno.ESTALE)
    return descriptor


def _no_direct(file: File, why: str, number: int | None) -> ReadError:
    return ReadError(
        f"{printable(file.name)} cannot be read past the page cache: {why}",
        errno=number,
        file=file.name,
        hint="choose the reader 'auto' or 'pread'",
    )


def _close_all(descriptors: dict[int, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])


def _windows(items: Sequence[Extent] | Sequence[Place]) -> Iterator[tuple[int, int]]:
    """Ranges of one file that are read at once, in order: whole blocks, at most ``WINDOW``."""
    gap = min(GAP, WINDOW // 2)  # no window is all gap
    for cluster in _clusters(items):
        low = high = -1
        for start, end in merged(span for item in cluster for span in spans(item, gap)):
            start, end = start // BLOCK * BLOCK, -(-end // BLOCK) * BLOCK
            if high < 0 or start > high + gap:
                yield from _pieces(low, high)
                low = start
            high = max(high, end)
        yield from _pieces(low, high)


def _pieces(low: int, high: int) -> Iterator[tuple[int, int]]:
    for start in range(low, high, WINDOW):
        yield start, min(start + WINDOW, high)


def _clusters(items: Sequence[Extent] | Sequence[Place]) -> Iterator[list[Extent | Place]]:
    """Neighbouring items; a gap that is never read lies between two clusters."""
    cluster: list[Extent | Place] = []
    reach = 0
    for item in items:
        if cluster and item.offset > reach + GAP + 2 * BLOCK:
            yield cluster
            cluster = []
        cluster.append(item)
        reach = max(reach, _end(item)) if len(cluster) > 1 else _end(item)
    if cluster:
        yield cluster


def _end(item: Extent | Place) -> int:
    return item.offset + (item.rows - 1) * item.file_stride + item.row_bytes


def _in_place(inside: Sequence[Extent], start: int, end: int) -> list[_Place]:
    """Whole blocks of a window that can land where they belong, in file order."""
    pieces: list[_Place] = []
    reach = 0
    for at, extent in enumerate(inside):
        alone = extent.offset >= reach  # nobody else wants these bytes
        reach = max(reach, _end(extent))
        if at + 1 < len(inside):
            alone = alone and inside[at + 1].offset >= reach
        low = -(-max(start, extent.offset) // BLOCK) * BLOCK
        high = min(end, _end(extent)) // BLOCK * BLOCK
        address = extent.dest.data_ptr() + low - extent.offset
        if alone and extent.rows == 1 and high - low >= IN_PLACE and address % BLOCK == 0:
            pieces.append((low, high, address))
    return pieces


def _layout(address: int, start: int, end: int, pieces: Sequence[_Place]) -> list[memoryview]:
    """The buffers of one request: the window's own memory, but for the pieces."""
    buffers: list[memoryview] = []
    at = start
    for low, high, place in (*pieces, (end, end, 0)):
        for begin, stop, target in ((at, low, address + at - start), (low, high, place)):
            if begin < stop:
                buffers.append(buffer_at(target, stop - begin))
        at = high
    return buffers


def _first(buffers: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """The first bytes of some buffers."""
    out: list[memoryview] = []
    for buffer in buffers:
        out.append(buffer[:nbytes])
        nbytes -= len(out[-1])
        if not nbytes:
            break
    return out
