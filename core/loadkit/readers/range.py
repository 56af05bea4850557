"""The reader of remote files: a few requests at a time, each a range of one file.

What is wanted is gathered into ranges of at most ``REQUEST`` bytes; gaps below ``GAP`` are fetched
along, since a request costs more than they do. A range that lies in one destination goes straight
into it. Others go through a buffer, one for each thread at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch

from loadkit.errors import LoadkitError
from loadkit.readers.base import Extent, Place, Reader, Survey
from loadkit.readers.extents import buffer_at, check_extent
from loadkit.readers.threads import Task, run_tasks
from loadkit.readers.windows import by_file, meeting, merged, owner_at, scatter, spans

if TYPE_CHECKING:
    from loadkit.config import LoadConfig

__all__ = ["GAP", "REQUEST", "THREADS", "RangeReader"]

REQUEST = 8 << 20  # bytes of one range at most, and of a buffer
GAP = 64 << 10  # bytes between two wanted pieces that are fetched rather than asked around
THREADS = 8  # requests under way: they wait for the network more than they compute


class RangeReader(Reader):
    """Fills memory by requests for ranges, ``num_threads`` (0: ``THREADS``) at once.

    Works with every ``File``; where one is local, a range is a read.
    """

    name: ClassVar[str] = "range"
    concurrent: ClassVar[bool] = True

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        self._threads = load_config.num_threads or THREADS
        self._buffers: deque[torch.Tensor] = deque()

    def buffer_bytes(self) -> int:
        return self._threads * REQUEST

    def survey(self, places: Iterable[Place]) -> Survey:
        windows = [window for part in by_file(places) for window in _windows(part)]
        return Survey(sum(end - start for start, end in windows), len(windows))

    def read(self, extents: Sequence[Extent], landed: Callable[[int], None] | None = None) -> int:
        """Fill every destination.

        Raises:
            ValueError: an extent does not fit its destination; nothing was read.
            TruncatedError: a file ended early.
            DownloadError: a server, or the way to it, failed; the tensor is named.
            ReadError: the operating system failed.
        """
        for extent in extents:
            check_extent(extent)
        tasks = list(self._tasks(extents))
        return run_tasks(iter(tasks), min(self._threads, len(tasks)), landed) if tasks else 0

    def _tasks(self, extents: Sequence[Extent]) -> Iterator[Task]:
        for part in by_file(extents):
            for start, end, inside in meeting(part, _windows(part)):
                yield partial(self._window, start, end, inside)

    def _window(self, start: int, end: int, inside: Sequence[Extent]) -> int:
        """Fetch one range and hand it on; the bytes fetched."""
        file, nbytes = inside[0].file, end - start
        try:
            address = _one_place(start, end, inside)
            if address is not None:
                file.read_into(start, buffer_at(address, nbytes))
                return nbytes
            buffer = self._buffer(nbytes)
            try:
                file.read_into(start, buffer_at(buffer.data_ptr(), nbytes))
                scatter(buffer.data_ptr(), start, end, inside)
            finally:
                self._buffers.append(buffer)
        except LoadkitError as error:
            if error.tensor is None:
                error.tensor = owner_at(
                    inside, start if error.offset is None else error.offset
                ).tensor
            raise
        return nbytes

    def _buffer(self, nbytes: int) -> torch.Tensor:
        """A buffer that nobody uses, of at least so many bytes."""
        try:
            buffer = self._buffers.pop()
        except IndexError:
            buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        if buffer.numel() < nbytes:
            buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return buffer

    def close(self) -> None:
        self._buffers.clear()


def _one_place(start: int, end: int, inside: Sequence[Extent]) -> int | None:
    """The address that a range's bytes belong to, if they are neighbours in one destination."""
    if len(inside) > 1:
        return None
    extent = inside[0]
    touching = extent.rows == 1 or extent.file_stride == extent.row_bytes == extent.dest_stride
    last = extent.offset + (extent.rows - 1) * extent.file_stride + extent.row_bytes
    if not touching or start < extent.offset or end > last:
        return None
    return extent.dest.data_ptr() + (start - extent.offset)


def _windows(items: Sequence[Extent] | Sequence[Place]) -> Iterator[tuple[int, int]]:
    """The ranges that are asked for of one file, in order; wanted bytes begin and end each."""
    start = end = -1
    for low, high in merged(span for item in items for span in spans(item, GAP)):
        while low < high:
            if end < 0 or low - end >= GAP or low >= start + REQUEST:
                if end >= 0:
                    yield start, end
                start = low
            end = min(high, start + REQUEST)
            low = end
    if end >= 0:
        yield start, end
