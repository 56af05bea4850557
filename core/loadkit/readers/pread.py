"""The reader for every file: a few threads, ``preadv`` straight into the destination.

How an extent is read, and what it counts:

- one run, or long rows that touch: see ``runs``. Counts its bytes.
- rows with a gap of at most ``GAP`` bytes: spans of whole rows, at most ``SPAN`` bytes each, gaps
  read and dropped. Long rows land in place (the gaps in a scrap buffer), short ones go through a
  staging buffer. Counts rows and gaps, but no gap between two spans.
- rows further apart: each row by itself, in place. Counts the rows.

The gap between two extents is never read. ``GAP`` is about where reading the gap (11 GB/s) costs
as much as a row's own call (1.1 us, more when threads wait for the interpreter lock); from
``LONG_ROW`` on a vector of rows beats a staged copy (CPU s/GiB, 4 KiB rows: 0.16 against 0.22;
1 KiB rows: 0.33 against 0.23).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch

from loadkit.readers import runs
from loadkit.readers.base import Extent, Place, Reader, Survey
from loadkit.readers.extents import buffer_at, check_extent, copy_rows
from loadkit.readers.runs import LONG_ROW, PIECE, fill, pull
from loadkit.readers.threads import Task, default_threads, run_tasks

if TYPE_CHECKING:
    from loadkit.config import LoadConfig

__all__ = ["PreadReader"]

SPAN = 1 << 20  # bytes of one span, and of a staging buffer
GAP = 12 << 10
ROWS_PER_TASK = 1024  # when each row is a call: a task must end soon after a cancel


class PreadReader(Reader):
    """Fills memory by ``preadv``. Every fault is a typed error.

    ``read`` uses at most ``num_threads`` threads (0: the usable CPUs, at most four), the caller's
    among them, and joins the others. One staging buffer of ``SPAN`` bytes per thread is kept
    from its first use until ``close``.
    """

    name: ClassVar[str] = "pread"

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        self._threads = default_threads(load_config.num_threads, most=4)
        self._stages: list[torch.Tensor] = []

    def survey(self, places: Iterable[Place]) -> Survey:
        return runs.survey(places, _survey_rows)

    def read(self, extents: Sequence[Extent], landed: Callable[[int], None] | None = None) -> int:
        """Fill every destination; ``landed`` gets counts that sum up to the result.

        Raises:
            ValueError: an extent does not fit its destination; nothing was read.
            TruncatedError: a file ended early.
            ReadError: the operating system failed.
        """
        for extent in extents:
            check_extent(extent)
        wanted = sum(extent.rows * extent.row_bytes for extent in extents)
        if not wanted:
            return 0
        threads = min(self._threads, -(-wanted // PIECE))
        return run_tasks(runs.tasks(extents, self._rows), threads, landed)

    def close(self) -> None:
        self._stages.clear()

    def _rows(self, extent: Extent) -> Iterator[Task]:
        """The work of rows with gaps."""
        per_span = _rows_per_span(extent)
        read_rows: Callable[[Extent, int, int], int]
        if per_span:
            read_rows, step = self._read_spans, per_span * max(1, PIECE // SPAN)
        else:
            read_rows = _read_alone
            step = max(1, min(ROWS_PER_TASK, PIECE // extent.row_bytes))
        for first in range(0, extent.rows, step):
            yield partial(read_rows, extent, first, min(step, extent.rows - first))

    def _read_spans(self, extent: Extent, first: int, count: int) -> int:
        """Rows ``first`` to ``first + count``, with the gaps between them."""
        per_span = _rows_per_span(extent)
        long_rows = extent.row_bytes >= LONG_ROW
        stage = self._stages.pop() if self._stages else _new_stage()
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


def _survey_rows(place: Place) -> Survey:
    """Rows with gaps: the gaps within spans count."""
    per_span = _rows_per_span(place)
    wanted = place.rows * place.row_bytes
    if not per_span:
        return Survey(wanted, place.rows)
    spans = -(-place.rows // per_span)
    return Survey(wanted + (place.rows - spans) * (place.file_stride - place.row_bytes), spans)


def _rows_per_span(item: Extent | Place) -> int:
    """Whole rows read by one call together with their gaps; 0 if each row is read by itself."""
    if item.rows < 2 or not 0 <= item.file_stride - item.row_bytes <= GAP:
        return 0
    per_span = SPAN // item.file_stride
    return per_span if per_span > 1 else 0


def _new_stage() -> torch.Tensor:
    return torch.empty(SPAN, dtype=torch.uint8, device="cpu")


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


def _read_alone(extent: Extent, first: int, count: int) -> int:
    """Each row by its own call."""
    row_bytes, stride = extent.row_bytes, extent.dest_stride
    memory = buffer_at(extent.dest.data_ptr() + first * stride, (count - 1) * stride + row_bytes)
    offset = extent.offset + first * extent.file_stride
    for start in range(0, count * stride, stride):
        row = memory[start : start + row_bytes]
        got = pull(extent.file, offset, (row,), extent)
        if got < row_bytes:
            fill(extent.file, offset + got, [row[got:]], (extent,))
        offset += extent.file_stride
    return count * row_bytes
