"""Units in pieces: how they are hashed, and what of a call's extents lies outside of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from loadkit.integrity.digests import BLOCK, FileDigests
from loadkit.readers.base import Extent
from loadkit.readers.windows import Cut, cut, meeting, place_of

__all__ = ["Check", "chunks", "outside", "part_of"]


class Check:
    """Digests of one unit while its bytes pass: its own, and those of its blocks to record."""

    def __init__(self, found: FileDigests, unit: int) -> None:
        self.whole = found.hash_of(unit)
        self.blocks: dict[int, str] = {}
        start, end = found.unit(unit)
        self._is_block = start % BLOCK == 0 and end == min(start + BLOCK, found.file.size)
        self._records = found.records and (found.whole is not None or found.digests[unit] is None)

    def add(self, offset: int, data: memoryview) -> None:
        """The next chunk, which begins at ``offset`` of the file."""
        self.whole.update(data)
        if self._records:
            alone = self.whole if self._is_block else hashlib.sha256(data)
            self.blocks[offset // BLOCK] = alone.hexdigest()


def chunks(start: int, end: int) -> Iterator[tuple[int, int]]:
    """A unit in parts of at most a block, cut where blocks of the file begin."""
    while start < end:
        stop = min(end, (start // BLOCK + 1) * BLOCK)
        yield start, stop
        start = stop


def outside(
    found: FileDigests, staged: Sequence[int], items: Sequence[Any]
) -> Iterator[tuple[Any, Cut]]:
    """What of the items lies outside of the staged units, in pieces."""
    gaps = []
    at = 0
    for start, end in map(found.unit, staged):
        gaps.append((at, start))
        at = end
    gaps.append((at, 1 << 62))
    for start, end, inside in meeting(items, [gap for gap in gaps if gap[0] < gap[1]]):
        for item in inside:
            for piece in cut(item, start, end):
                yield item, piece


def part_of(item: Extent, piece: Cut) -> Extent:
    """A piece of an extent as an extent."""
    into = piece.row * item.dest_stride + piece.column
    stop = into + (piece.rows - 1) * item.dest_stride + piece.nbytes
    place = place_of(item, piece)
    return Extent(*place[:5], item.dest[into:stop], item.dest_stride, item.tensor)
