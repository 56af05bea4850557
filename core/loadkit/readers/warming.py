"""Threads that read ranges of files into the page cache, a bounded way ahead of who uses them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loadkit.sources.base import File

__all__ = ["SCRATCH", "Lane", "Warm", "Warmer", "warm"]

Range = tuple["File", int, int]  # file, first byte, byte after the last
Warm = Callable[["File", int, int], None]
"""Has the bytes of a file from one offset to another in the page cache."""
SCRATCH = 1 << 20  # bytes that a thread reads at once, and throws away


def warm(file: File, start: int, end: int) -> None:
    """Read what nobody looks at; a file that ends early is the reader's to find."""
    scratch = memoryview(bytearray(min(SCRATCH, end - start)))
    while start < end:
        got = os.preadv(file.fileno(), [scratch[: end - start]], start)
        if not got:
            return
        start += got


class Lane:
    """Ranges in the order in which they will be used. Counts in bytes from the first one on.

    Args:
        ranges: what is to be warmed.
        expected: bytes that their user will have counted when it is through; 0: as many as the
            ranges have. Gaps that are warmed and not read make the difference.

    Attributes:
        issued: how far warming has come.
        used: how far their user has come, in whatever order it went.
    """

    def __init__(self, ranges: Sequence[Range] = (), expected: int = 0) -> None:
        self.ranges = list(ranges)
        self.total = sum(end - start for _, start, end in self.ranges)
        self.issued = self.used = 0
        self._expected = expected or self.total
        self._counted = 0
        self._at = 0  # the range that comes next, and how much of it was issued
        self._inside = 0

    @property
    def ahead(self) -> int:
        """Bytes warmed and not used."""
        return max(0, self.issued - self.used)

    def use(self, nbytes: int) -> None:
        """Its user counted so many bytes more."""
        self._counted += nbytes
        self.used = self.total * min(self._counted, self._expected) // max(1, self._expected)

    def next(self, most: int) -> Range | None:
        """The next bytes, at most ``most``; what was used already is passed over."""
        while self._at < len(self.ranges):
            file, start, end = self.ranges[self._at]
            start += self._inside
            late = min(end - start, max(0, self.used - self.issued))
            taken = late or min(end - start, most)
            self.issued += taken
            self._inside += taken
            if start + taken == end:
                self._at, self._inside = self._at + 1, 0
            if not late and taken:
                return file, start, start + taken
        return None

    def give_back(self, nbytes: int) -> None:
        """Bytes of the last answer that will not be warmed now."""
        self.issued -= nbytes
        if not self._inside:
            self._at -= 1
            _, start, end = self.ranges[self._at]
            self._inside = end - start
        self._inside -= nbytes


class Warmer:
    """Warms lanes, the first one first, never more than ``budget`` bytes ahead of their users.

    Args:
        threads: how many at most.
        block: bytes of one read.
        budget: bytes; at least one block is always allowed.
        warm: how a range gets into the page cache.
    """

    def __init__(self, threads: int, block: int, budget: int, warm: Warm = warm) -> None:
        self.error: OSError | None = None  # why it stopped early
        self.most_ahead = 0  # bytes, for those who want to know
        self._block, self._budget, self._warm = block, max(block, budget), warm
        self._threads_wanted = threads
        self._threads: list[threading.Thread] = []
        self._lanes: list[Lane] = []
        self._moved = threading.Condition()
        self._stopped = self._no_more = False

    def add(self, lane: Lane, *, first: bool = False) -> None:
        """One more lane, behind the others or before them; starts the threads."""
        with self._moved:
            self._lanes.insert(0 if first else len(self._lanes), lane)
            self._moved.notify_all()
        self._start()

    def use(self, lane: Lane, nbytes: int) -> None:
        """Bytes of a lane were used."""
        with self._moved:
            lane.use(nbytes)
            self._moved.notify_all()

    def remove(self, lane: Lane) -> None:
        """Nobody uses a lane any more."""
        with self._moved:
            self._lanes.remove(lane)
            self._moved.notify_all()

    def drain(self) -> None:
        """Wait until everything is warm, then end the threads."""
        with self._moved:
            self._no_more = True
            for lane in self._lanes:
                lane.used = max(lane.used, lane.issued)
            self._moved.notify_all()
        self._join()

    def cancel(self) -> None:
        """End the threads; what is not warm stays so. May be called twice."""
        with self._moved:
            self._stopped = True
            self._moved.notify_all()
        self._join()

    def _start(self) -> None:
        while len(self._threads) < self._threads_wanted and not self._stopped:
            thread = threading.Thread(target=self._work, name="loadkit-prefetch", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the machine's thread limit: go on with those there are
                self._threads_wanted = len(self._threads)
                return
            self._threads.append(thread)

    def _join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (found := self._draw()) is not None:
            try:
                self._warm(*found)
            except OSError as error:  # the reader will meet it too, and says so with all it knows
                with self._moved:
                    self.error = self.error or error
                    self._stopped = True
                    self._moved.notify_all()

    def _draw(self) -> Range | None:
        """The next range as soon as the budget has room for it; None at the end."""
        with self._moved:
            while not self._stopped:
                left = False
                for lane in self._lanes:
                    found = lane.next(self._block)
                    if found is None:
                        continue
                    left = True
                    ahead = sum(each.ahead for each in self._lanes)
                    if ahead <= self._budget or self._no_more:
                        self.most_ahead = max(self.most_ahead, 0 if self._no_more else ahead)
                        return found
                    lane.give_back(found[2] - found[1])
                    break
                if not left and self._no_more:
                    return None
                self._moved.wait()
            return None
