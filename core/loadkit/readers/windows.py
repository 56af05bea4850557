"""The part of an extent that lies in one window of its file, and how it gets out of a buffer.

For readers that read a window (a range of bytes) into a buffer of their own and hand it on from
there. All in bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from loadkit.readers.base import Extent, Place
from loadkit.readers.extents import copy_rows

__all__ = ["Cut", "by_file", "cut", "meeting", "merged", "owner_at", "place_of", "scatter", "spans"]

Item = TypeVar("Item", Extent, Place)


class Cut(NamedTuple):
    """``rows`` rows from ``row`` on, of each the bytes from ``column`` on, ``nbytes`` many."""

    row: int
    rows: int
    column: int
    nbytes: int


def cut(item: Extent | Place, start: int, end: int) -> Iterator[Cut]:
    """What of an item's rows lies in ``[start, end)``: whole rows, and parts of rows at borders."""
    stride, row_bytes = item.file_stride, item.row_bytes
    if not row_bytes or not item.rows:
        return
    if item.rows > 1 and stride < row_bytes:  # rows that overlap in the file, or are one
        for row in range(item.rows):
            yield from _one(row, row_bytes, start - item.offset - row * stride, end - start)
        return
    low, high = start - item.offset, end - item.offset
    if item.rows == 1:
        yield from _one(0, row_bytes, low, end - start)
        return
    first = max(0, (low - row_bytes) // stride + 1)
    last = min(item.rows - 1, (high - 1) // stride)
    if high <= 0 or first > last:
        return
    if first * stride < low:
        yield from _one(first, row_bytes, low - first * stride, end - start)
        first += 1
    whole = last if last * stride + row_bytes <= high else last - 1
    if whole >= first:
        yield Cut(first, whole - first + 1, 0, row_bytes)
    if first <= last and whole < last:
        yield from _one(last, row_bytes, low - last * stride, end - start)


def _one(row: int, row_bytes: int, low: int, length: int) -> Iterator[Cut]:
    """The part of one row that lies in a window that begins ``low`` bytes after the row does."""
    begin, stop = max(0, low), min(row_bytes, low + length)
    if begin < stop:
        yield Cut(row, 1, begin, stop - begin)


def place_of(item: Extent | Place, part: Cut) -> Place:
    """Where a cut lies in the file."""
    offset = item.offset + part.row * item.file_stride + part.column
    return Place(item.file, offset, part.nbytes, part.rows, item.file_stride, item.tensor)


def scatter(buffer: int, start: int, end: int, extents: Sequence[Extent]) -> None:
    """Copy what a buffer at address ``buffer`` holds of ``[start, end)`` to where it belongs."""
    for extent in extents:
        for part in cut(extent, start, end):
            source = extent.offset + part.row * extent.file_stride + part.column - start
            into = part.row * extent.dest_stride + part.column
            copy_rows(
                buffer + source,
                extent.file_stride,
                extent.dest.data_ptr() + into,
                extent.dest_stride,
                part.nbytes,
                part.rows,
            )


def spans(item: Extent | Place, gap: int) -> Iterator[tuple[int, int]]:
    """Ranges of the file that hold all of an item; gaps of less than ``gap`` are taken along."""
    if not item.rows or not item.row_bytes:
        return
    if item.rows == 1 or item.file_stride - item.row_bytes < gap:
        yield item.offset, item.offset + (item.rows - 1) * item.file_stride + item.row_bytes
        return
    for row in range(item.rows):
        offset = item.offset + row * item.file_stride
        yield offset, offset + item.row_bytes


def meeting(
    items: Sequence[Item], windows: Iterable[tuple[int, int]]
) -> Iterator[tuple[int, int, list[Item]]]:
    """Each window with the items that lie in it; both of one file, in file order."""
    near: list[Item] = []
    drawn = 0
    for start, end in windows:
        near = [item for item in near if _end(item) > start]
        while drawn < len(items) and items[drawn].offset < end:
            near.append(items[drawn])
            drawn += 1
        yield start, end, [item for item in near if _end(item) > start]


def _end(item: Extent | Place) -> int:
    return item.offset + (item.rows - 1) * item.file_stride + item.row_bytes


def owner_at(inside: Sequence[Extent], offset: int) -> Extent:
    """Which of a window's extents an error at an offset of the file is told by."""
    return next((extent for extent in inside if _end(extent) > offset), inside[-1])


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges as their union, in order: what overlaps or touches becomes one."""
    out: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], end)
        elif start < end:
            out.append((start, end))
    return out


def by_file(items: Iterable[Item]) -> list[list[Item]]:
    """Items that have bytes, file by file, in the order they came."""
    found: dict[int, list[Item]] = {}
    for item in items:
        if item.rows and item.row_bytes:
            found.setdefault(id(item.file), []).append(item)
    return list(found.values())
