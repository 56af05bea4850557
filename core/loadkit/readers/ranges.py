"""Ranges: how the work of a read is put to a library that fills memory from (file, offset, size).

What is one run of a file lands in place. Short rows with small gaps come in spans, gaps included:
a span goes through a buffer, and its rows are copied from there. All in bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from loadkit.errors import LoadkitError, ReadError
from loadkit.readers.base import Extent, Place, Survey
from loadkit.readers.extents import buffer_at, copy_rows
from loadkit.readers.runs import fill
from loadkit.sources.base import File
from loadkit.text import printable

__all__ = ["PIECE", "SPAN", "Batch", "Range", "batches", "refused", "survey"]

PIECE = 16 << 20  # bytes of one range, at most
SPAN = 1 << 20  # bytes of a span, at most
GAP = 12 << 10  # rows this near are read with their gaps ...
SHORT_ROW = 32 << 10  # ... where they are shorter than this
RANGES = 4096  # ranges of a batch, at most
BATCH = 1 << 30  # bytes of a batch, at most


class Range(NamedTuple):
    """``nbytes`` bytes of a file from ``offset`` on, and the address that they go to.

    ``rows`` of the extent from ``row`` on are in it; more than one: the address is in a buffer.
    """

    file: File
    offset: int
    nbytes: int
    address: int
    extent: Extent
    row: int
    rows: int


class Batch(NamedTuple):
    """Ranges that are read at once; ``settle`` puts in place what came through the buffer."""

    ranges: list[Range]
    settle: Callable[[], None]


class _Cut(NamedTuple):
    """A range before its address is known: whole rows of an item, or a part of one row."""

    offset: int
    nbytes: int
    row: int
    rows: int
    column: int


def survey(places: Iterable[Place]) -> Survey:
    """What the ranges of these places take, and how many they are."""
    nbytes = requests = 0
    for place in places:
        if not place.rows or not place.row_bytes:
            continue
        per_span = _rows_per_span(place)
        if per_span:
            spans = -(-place.rows // per_span)
            gaps = (place.rows - spans) * (place.file_stride - place.row_bytes)
            nbytes, requests = nbytes + place.rows * place.row_bytes + gaps, requests + spans
        else:
            nbytes += place.rows * place.row_bytes
            requests += place.rows * -(-place.row_bytes // PIECE)
    return Survey(nbytes, requests)


def batches(extents: Iterable[Extent], buffer: Callable[[], torch.Tensor]) -> Iterator[Batch]:
    """The ranges of all extents, in their order; a batch is made when the one before is done.

    Args:
        extents: what is wanted.
        buffer: gives uint8 [n] of CPU memory that spans may use, at least ``SPAN`` bytes; called
            when there is a span.
    """
    ranges: list[Range] = []
    total = used = 0
    for extent in extents:
        for part in _cuts(extent):
            spanned = part.rows > 1
            full = len(ranges) == RANGES or total + part.nbytes > BATCH
            if ranges and (full or (spanned and used + part.nbytes > buffer().numel())):
                yield _batch(ranges)
                ranges, total, used = [], 0, 0
            if spanned:
                address = buffer().data_ptr() + used
                used += part.nbytes
            else:
                address = extent.dest.data_ptr() + part.row * extent.dest_stride + part.column
            where = part.offset, part.nbytes, address
            ranges.append(Range(extent.file, *where, extent, part.row, part.rows))
            total += part.nbytes
    if ranges:
        yield _batch(ranges)


def _batch(ranges: list[Range]) -> Batch:
    def settle() -> None:
        for item in ranges:
            if item.rows > 1:
                _put(item)

    return Batch(ranges, settle)


def _put(item: Range) -> None:
    """Copy the rows of a span from the buffer to where they belong."""
    extent = item.extent
    at = item.row * extent.dest_stride
    if extent.dest.device.type == "cpu":
        copy_rows(
            item.address,
            extent.file_stride,
            extent.dest.data_ptr() + at,
            extent.dest_stride,
            extent.row_bytes,
            item.rows,
        )
        return
    flat = torch.frombuffer(buffer_at(item.address, item.nbytes), dtype=torch.uint8)
    size = item.rows, extent.row_bytes
    into = extent.dest.as_strided(size, (extent.dest_stride, 1), extent.dest.storage_offset() + at)
    into.copy_(flat.as_strided(size, (extent.file_stride, 1)))


def _cuts(extent: Extent) -> Iterator[_Cut]:
    if not extent.rows or not extent.row_bytes:
        return
    stride, row_bytes = extent.file_stride, extent.row_bytes
    per_span = _rows_per_span(extent)
    if per_span:
        for row in range(0, extent.rows, per_span):
            rows = min(per_span, extent.rows - row)
            nbytes = (rows - 1) * stride + row_bytes
            yield _Cut(extent.offset + row * stride, nbytes, row, rows, 0)
        return
    for row in range(extent.rows):
        start = extent.offset + row * stride
        for column in range(0, row_bytes, PIECE):
            yield _Cut(start + column, min(PIECE, row_bytes - column), row, 1, column)


def _rows_per_span(item: Extent | Place) -> int:
    """Rows that come together with their gaps; 0 if each is a range by itself."""
    gap = item.file_stride - item.row_bytes
    if item.rows < 2 or item.row_bytes >= SHORT_ROW or not 0 <= gap <= GAP:
        return 0
    return SPAN // item.file_stride


def refused(
    item: Range, library: str, said: str, *, together: Iterable[Range] = ()
) -> LoadkitError:
    """The error about a range that a library could not read.

    It is read again, by the operating system: what that says is the error of every reader.

    Args:
        item: the range.
        library: who failed.
        said: what it said, for the case that nothing is wrong with the file.
        together: ranges that the library may have read with this one, as one.
    """
    scratch = torch.empty(min(item.nbytes, SPAN), dtype=torch.uint8)
    owners: Sequence[Extent] = (item.extent,)
    name = item.extent.tensor
    try:
        for start in range(0, item.nbytes, SPAN):
            nbytes = min(SPAN, item.nbytes - start)
            fill(item.file, item.offset + start, [buffer_at(scratch.data_ptr(), nbytes)], owners)
    except LoadkitError as error:
        if error.tensor is None:
            error.tensor = name
        return error
    for other in together:
        if other.file is item.file and other.offset + other.nbytes > _size_now(item.file):
            return refused(other, library, said)
    return ReadError(
        f"reading tensor {printable(name)} from {printable(item.file.name)} at byte {item.offset} "
        f"failed: {library} says: {printable(said)}; the system reads the same {item.nbytes:,} "
        "bytes without an error",
        file=item.file.name,
        tensor=name,
        offset=item.offset,
        hint="load again, or name another reader: reader='pread'",
    )


def _size_now(file: File) -> int:
    """Bytes that a file has at this moment."""
    return os.fstat(file.fileno()).st_size if file.local else file.size
