"""Both ends of every item, fetched at once: of a remote file each read is a request.

An archive begins with its pickle and ends with its directory. Items follow one another, so the end
of one and the start of the next are one range; of small items whole runs are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loadkit.sources.base import File

__all__ = ["END_BYTES", "Windows", "windows_of"]

END_BYTES = 2048  # of each end; torch's pickle of one tensor and its directory are shorter
GAP = 16 << 10  # bytes between two ranges that are fetched rather than asked around
THREADS = 8


class Windows:
    """Ranges of one file that are here already."""

    def __init__(self, ranges: list[tuple[int, bytes]]) -> None:
        self._starts = [start for start, _ in ranges]
        self._data = [data for _, data in ranges]

    def read(self, offset: int, nbytes: int) -> bytes | None:
        """Bytes from ``offset`` on; None where they are not all here."""
        at = bisect_right(self._starts, offset) - 1
        if at < 0:
            return None
        start = offset - self._starts[at]
        data = self._data[at][start : start + nbytes]
        return data if len(data) == nbytes else None


def windows_of(file: File, places: Iterable[tuple[int, int]]) -> Windows:
    """Fetch the ends of items.

    Args:
        file: a remote file.
        places: first byte and length of each item.

    Raises:
        ReadFailure: the server, or the way to it, failed.
    """
    ends = [
        (max(0, start), min(file.size, end))
        for offset, length in places
        for start, end in (
            (offset, offset + END_BYTES),
            (offset + length - END_BYTES, offset + length),
        )
    ]
    ranges: list[list[int]] = []
    for start, end in sorted(one for one in ends if one[0] < one[1]):
        if ranges and start <= ranges[-1][1] + GAP:
            ranges[-1][1] = max(ranges[-1][1], end)
        else:
            ranges.append([start, end])

    def fetch(one: list[int]) -> tuple[int, bytes]:
        data = bytearray(one[1] - one[0])
        file.read_into(one[0], memoryview(data))
        return one[0], bytes(data)

    with ThreadPoolExecutor(THREADS, thread_name_prefix="loadkit-dcp") as pool:
        return Windows(list(pool.map(fetch, ranges)))
