"""The reader that goes through each file once, from front to back, in large reads.

For file systems that are fast at one long read and slow at everything else (Lustre, NFS, FUSE).
A window of at most ``WINDOW`` bytes is read into one buffer and handed on from there, so a file is
never in memory as a whole. Gaps inside a window are read, longer ones are passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch

from loadkit.readers.base import Extent, Place, Reader, Survey
from loadkit.readers.extents import buffer_at, check_extent
from loadkit.readers.runs import fill
from loadkit.readers.windows import by_file, meeting, merged, owner_at, scatter, spans

if TYPE_CHECKING:
    from loadkit.config import LoadConfig
    from loadkit.sources.base import File

__all__ = ["WINDOW", "EagerReader"]

WINDOW = 16 << 20  # bytes of one read, and of the one buffer


class EagerReader(Reader):
    """Reads on the calling thread alone. Keeps one buffer of ``WINDOW`` bytes until ``close``.

    Where its caller is ``streaming`` it reads whole windows ahead and serves later calls from
    them; each byte of a file is then read once however many calls ask for a part.
    """

    name: ClassVar[str] = "eager"

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        self._buffer: torch.Tensor | None = None
        self._held: tuple[File, int, int] | None = None  # what the buffer holds: file, start, end

    def buffer_bytes(self) -> int:
        return WINDOW

    def survey(self, places: Iterable[Place]) -> Survey:
        windows = [window for part in by_file(places) for window in _windows(part)]
        return Survey(sum(end - start for start, end in windows), len(windows))

    def read(self, extents: Sequence[Extent], landed: Callable[[int], None] | None = None) -> int:
        """Fill every destination, one file after the other, window by window.

        Raises:
            ValueError: an extent does not fit its destination; nothing was read.
            TruncatedError: a file ended early.
            ReadError: the operating system failed.
        """
        for extent in extents:
            check_extent(extent)
        if not self.streaming:
            self._held = None
        total = 0
        for part in by_file(extents):
            file = part[0].file
            windows = self._ahead(file, part) if self.streaming else _windows(part)
            for start, end, inside in meeting(part, windows):
                total += self._window(file, start, end, inside, landed)
        return total

    def _window(
        self,
        file: File,
        start: int,
        end: int,
        inside: Sequence[Extent],
        landed: Callable[[int], None] | None,
    ) -> int:
        """Have a window in the buffer and hand it on; the bytes read for it."""
        moved = 0
        address = self._address()
        if self._held != (file, start, end):
            self._held = None
            buffer = buffer_at(address, end - start)
            moved = fill(file, start, [buffer], partial(owner_at, inside))
            self._held = file, start, end
            if landed is not None:
                landed(moved)
        scatter(address, start, end, inside)
        return moved

    def _ahead(self, file: File, extents: Sequence[Extent]) -> Iterator[tuple[int, int]]:
        """Windows of full size: the one in the buffer first, if it holds what comes first."""
        for start, end in merged(span for extent in extents for span in spans(extent, WINDOW)):
            while start < end:
                held = self._held
                if held is None or held[0] is not file or not held[1] <= start < held[2]:
                    held = file, start, min(start + WINDOW, max(end, file.size))
                yield held[1], held[2]
                start = held[2]

    def _address(self) -> int:
        if self._buffer is None:
            self._buffer = torch.empty(WINDOW, dtype=torch.uint8, device="cpu")
        return self._buffer.data_ptr()

    def close(self) -> None:
        self._buffer = self._held = None


def _windows(items: Sequence[Extent] | Sequence[Place]) -> Iterator[tuple[int, int]]:
    """What is read of one file for these, in order: each window begins and ends with wanted bytes.

    A window goes on over a gap as long as it has room.
    """
    start = end = -1
    for low, high in merged(span for item in items for span in spans(item, WINDOW)):
        while low < high:
            if end < 0 or low >= start + WINDOW:
                if end >= 0:
                    yield start, end
                start = low
            end = min(high, start + WINDOW)
            low = end
    if end >= 0:
        yield start, end
