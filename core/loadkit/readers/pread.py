"""The reader for every file: a few threads, ``preadv`` straight into the destination.

One run, or long rows that touch: see ``runs``. Rows with gaps: see ``rows``. The gap between two
extents is never read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar

from loadkit.readers import runs
from loadkit.readers.base import Extent, Place, Reader, Survey
from loadkit.readers.extents import check_extent
from loadkit.readers.file_states import FileStates, announce
from loadkit.readers.rows import RowReads
from loadkit.readers.runs import PIECE
from loadkit.readers.threads import run_tasks, threads_for

if TYPE_CHECKING:
    from loadkit.config import LoadConfig

__all__ = ["PreadReader"]


class PreadReader(Reader):
    """Fills memory by ``preadv``. Every fault is a typed error.

    ``read`` uses at most ``num_threads`` threads (0: the usable CPUs, at most four), the caller's
    among them, and joins the others. A staging buffer of ``rows.SPAN`` bytes per thread is kept
    from its first use until ``close``.
    """

    name: ClassVar[str] = "pread"
    concurrent: ClassVar[bool] = True

    def __init__(self, load_config: LoadConfig, states: FileStates | None = None) -> None:
        super().__init__(load_config)
        self._threads = threads_for(load_config, most=4)
        self._states = states or FileStates()
        self._rows = RowReads(self._states)

    def survey(self, places: Iterable[Place]) -> Survey:
        return runs.survey(places, self._rows.survey)

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
        announce(extents, self._states)
        threads = min(self._threads, -(-wanted // PIECE))
        return run_tasks(runs.tasks(extents, self._rows.tasks), threads, landed)

    def close(self) -> None:
        self._rows.close()
