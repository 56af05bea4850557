"""Rows with gaps between them, read by calls: in spans with their gaps, or each by itself.

- a gap of at most ``GAP`` bytes (``FAR_GAP`` on file systems that are not local): spans of whole
  rows, at most ``SPAN`` bytes each, gaps read and dropped. Long rows land in place (the gaps in a
  scrap buffer), short ones go through a staging buffer. Counts rows and gaps, but no gap between
  two spans.
- rows further apart: each row by itself, in place. Counts the rows.

``GAP`` is about where reading the gap (11 GB/s) costs as much as a row's own call (1.1 us, more
when threads wait for the interpreter lock); from ``LONG_ROW`` on a vector of rows beats a staged
copy (CPU s/GiB, 4 KiB rows: 0.16 against 0.22; 1 KiB rows: 0.33 against 0.23). From a cold disk a
row's own read costs as much as 50 KiB: up to ``COLD_GAP`` the range of a task is asked for before
its rows are read (2 KiB of each 16: 0.4 s in place of 1.5). On other file systems a request is a
round trip.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import torch

from loadkit.readers.base import Extent, Place, Survey
from loadkit.readers.extents import buffer_at, copy_rows
from loadkit.readers.file_states import FileStates, will_need
from loadkit.readers.runs import LONG_ROW, PIECE, fill, pull
from loadkit.readers.threads import Task

__all__ = ["FAR_GAP", "GAP", "SPAN", "RowReads"]

SPAN = 1 << 20  # bytes of one span, and of a staging buffer
GAP = 12 << 10
COLD_GAP = 48 << 10
FAR_GAP = 128 << 10
ROWS_PER_TASK = 1024  # when each row is a call: a task must end soon after a cancel


class RowReads:
    """Makes the tasks of rows with gaps. Keeps a staging buffer per thread until ``close``."""

    def __init__(self, states: FileStates) -> None:
        self._states = states
        self._stages: deque[torch.Tensor] = deque()

    def survey(self, place: Place) -> Survey:
        """What ``tasks`` read: the gaps within spans count."""
        per_span = self._rows_per_span(place)
        wanted = place.rows * place.row_bytes
        if not per_span:
            return Survey(wanted, place.rows)
        spans = -(-place.rows // per_span)
        return Survey(wanted + (place.rows - spans) * (place.file_stride - place.row_bytes), spans)

    def tasks(self, extent: Extent) -> Iterator[Task]:
        """The work of one extent."""
        per_span = self._rows_per_span(extent)
        read_rows: Callable[[Extent, int, int], int]
        if per_span:
            read_rows, step = self._read_spans, per_span * max(1, PIECE // SPAN)
        else:
            read_rows = self._read_alone
            step = max(1, min(ROWS_PER_TASK, PIECE // extent.row_bytes))
        for first in range(0, extent.rows, step):
            yield partial(read_rows, extent, first, min(step, extent.rows - first))

    def close(self) -> None:
        """Let the staging buffers go."""
        self._stages.clear()

    def _rows_per_span(self, item: Extent | Place) -> int:
        """Whole rows read by one call together with their gaps; 0 if each is read by itself."""
        gap = item.file_stride - item.row_bytes
        if item.rows < 2 or not 0 <= gap <= FAR_GAP:
            return 0
        if gap > GAP and (item.file.path is None or self._states.is_local(item.file)):
            return 0
        per_span = SPAN // item.file_stride
        return per_span if per_span > 1 else 0

    def _read_spans(self, extent: Extent, first: int, count: int) -> int:
        """Rows ``first`` to ``first + count``, with the gaps between them."""
        per_span = self._rows_per_span(extent)
        long_rows = extent.row_bytes >= LONG_ROW
        try:
            stage = self._stages.pop()
        except IndexError:  # all are in use, in this thread or in others
            stage = torch.empty(SPAN, dtype=torch.uint8, device="cpu")
        moved = 0
        try:
            for row in range(first, first + count, per_span):
                rows = min(per_span, first + count - row)
                offset = extent.offset + row * extent.file_stride
                if long_rows:
                    buffers = _rows_and_gaps(extent, row, rows, stage)
                else:
                    nbytes = (rows - 1) * extent.file_stride + extent.row_bytes
                    buffers = [buffer_at(stage.data_ptr(), nbytes)]
                moved += fill(extent.file, offset, buffers, [extent] * len(buffers))
                if not long_rows:
                    copy_rows(
                        stage.data_ptr(),
                        extent.file_stride,
                        extent.dest.data_ptr() + row * extent.dest_stride,
                        extent.dest_stride,
                        extent.row_bytes,
                        rows,
                    )
        finally:
            self._stages.append(stage)
        return moved

    def _read_alone(self, extent: Extent, first: int, count: int) -> int:
        """Each row by its own call."""
        row_bytes, stride = extent.row_bytes, extent.dest_stride
        start = extent.dest.data_ptr() + first * stride
        memory = buffer_at(start, (count - 1) * stride + row_bytes)
        offset = extent.offset + first * extent.file_stride
        near = 0 < extent.file_stride - row_bytes <= COLD_GAP
        if near and count > 1 and self._states.is_cold(extent.file):
            will_need(extent.file, offset, (count - 1) * extent.file_stride + row_bytes)
        for start in range(0, count * stride, stride):
            row = memory[start : start + row_bytes]
            got = pull(extent.file, offset, (row,), extent)
            if got < row_bytes:
                fill(extent.file, offset + got, [row[got:]], (extent,))
            offset += extent.file_stride
        return count * row_bytes


def _rows_and_gaps(extent: Extent, row: int, rows: int, scrap: torch.Tensor) -> list[memoryview]:
    """Buffers for a span: a row in place, its gap into scrap, the next row ..."""
    stride = extent.dest_stride
    memory = buffer_at(
        extent.dest.data_ptr() + row * stride, (rows - 1) * stride + extent.row_bytes
    )
    gap = buffer_at(scrap.data_ptr(), extent.file_stride - extent.row_bytes)
    buffers = []
    for start in range(0, rows * stride, stride):
        buffers += [memory[start : start + extent.row_bytes], gap]
    buffers.pop()
    return buffers
