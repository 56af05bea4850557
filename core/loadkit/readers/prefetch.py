"""A reader around another one: threads warm the page cache ahead of it.

What it warms is what the plan of this rank reads, nothing else. One call that reads more than the
budget is warmed while it runs; many small ones are warmed in file order, since they come so; what
is used through a mapping comes last, and is warm when the load ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from loadkit.readers.base import Extent, Place, Reader, Survey
from loadkit.readers.warming import SCRATCH, Lane, Warm, Warmer, warm
from loadkit.readers.windows import by_file, merged, spans

if TYPE_CHECKING:
    import torch

    from loadkit.sources.base import File

__all__ = ["PrefetchingReader"]

Landed = Callable[[int], None]
GAP = 128 << 10  # a gap up to this is warmed along: as the kernel's read-ahead does
BLOCKS_AHEAD = 2  # blocks per thread that may be warm and not used


class PrefetchingReader(Reader):
    """Another reader, with its bytes in the page cache before it asks.

    Args:
        inner: who reads. ``safetensors_prefetch_num_threads`` and ``..._block_size`` of its
            ``load_config`` count; what is warmed ahead is at most two blocks per thread.
        warm: how a range gets into the page cache.
    """

    def __init__(self, inner: Reader, warm: Warm = warm) -> None:
        super().__init__(inner.load_config)
        self.inner = inner
        self.name = inner.name  # type: ignore[misc]  # a layer, not a reader with its own name
        self.aliases = inner.aliases  # type: ignore[misc]
        self.overlays = inner.overlays  # type: ignore[misc]
        self.concurrent = inner.concurrent  # type: ignore[misc]
        threads = inner.load_config.safetensors_prefetch_num_threads
        block = inner.load_config.safetensors_prefetch_block_size
        self.budget = BLOCKS_AHEAD * threads * block
        self.warmer = Warmer(threads, block, self.budget, warm)
        self.remarks = inner.remarks
        self._planned = False
        self._expected_small = 0
        self._small: dict[int, tuple[File, list[tuple[int, int]]]] = {}
        self._views: dict[int, tuple[File, list[tuple[int, int]]]] = {}
        self._lanes: tuple[Lane, Lane] | None = None  # of small calls, of views

    def buffer_bytes(self) -> int:
        return self.load_config.safetensors_prefetch_num_threads * SCRATCH + (
            self.inner.buffer_bytes()
        )

    def survey(self, places: Iterable[Place]) -> Survey:
        places = list(places)
        self._begin()
        if _wanted(places) <= self.budget:
            for part in by_file(places):
                _, ranges = self._small.setdefault(id(part[0].file), (part[0].file, []))
                ranges += [span for place in part for span in spans(place, GAP)]
            found = self.inner.survey(places)
            self._expected_small += found.nbytes
            return found
        return self.inner.survey(places)

    def maps(self, place: Place) -> bool:
        return self.inner.maps(place)

    def bring(self, place: Place) -> None:
        self.inner.bring(place)

    def expect_view(self, file: File, offset: int, nbytes: int) -> None:
        self._begin()
        self._views.setdefault(id(file), (file, []))[1].append((offset, offset + nbytes))
        self.inner.expect_view(file, offset, nbytes)

    def survey_end(self) -> Survey:
        self._planned = True
        return self.inner.survey_end()

    def _begin(self) -> None:
        """After a whole plan: what is surveyed now belongs to a new one."""
        if self._planned:
            self._planned = False
            self._small.clear()
            self._views.clear()
            self._expected_small = 0

    def read(self, extents: Sequence[Extent], landed: Landed | None = None) -> int:
        """As the inner reader; threads warm what it comes to next."""
        lane, _ = self._started()
        large = _wanted(extents) > self.budget
        if large:
            lane = self._lane_of(extents)
            self.warmer.add(lane, first=True)

        def used(nbytes: int) -> None:
            self.warmer.use(lane, nbytes)
            if landed is not None:
                landed(nbytes)

        self.inner.streaming = self.streaming
        try:
            moved = self.inner.read(extents, used)
        except BaseException:
            self.warmer.cancel()
            raise
        if large:
            self.warmer.remove(lane)
        return moved

    def _lane_of(self, extents: Sequence[Extent]) -> Lane:
        ranges = {
            id(part[0].file): (part[0].file, [s for extent in part for s in spans(extent, GAP)])
            for part in by_file(extents)
        }
        places = [Place(e.file, e.offset, e.row_bytes, e.rows, e.file_stride) for e in extents]
        return Lane(_ranges(ranges), self.inner.survey(places).nbytes)

    def view(self, file: File, offset: int, nbytes: int) -> torch.Tensor:
        """As the inner reader; the bytes count as used."""
        _, views = self._started()
        shown = self.inner.view(file, offset, nbytes)
        self.warmer.use(views, nbytes)
        return shown

    def overlay(self, file: File, offset: int, into: torch.Tensor) -> None:
        """As the inner reader; the bytes count as used."""
        _, views = self._started()
        self.inner.overlay(file, offset, into)
        self.warmer.use(views, into.numel())

    def _started(self) -> tuple[Lane, Lane]:
        if self._lanes is None:
            small = Lane(_ranges(self._small), self._expected_small)
            viewed = sum(end - start for _, views in self._views.values() for start, end in views)
            self._lanes = small, Lane(_ranges(self._views), viewed)
            for lane in self._lanes:
                self.warmer.add(lane)
        return self._lanes

    def end(self, landed: Landed | None = None) -> int:
        """Wait until all is warm, and end the threads."""
        self.warmer.drain()
        if self.warmer.error is not None:
            self.remarks.append(f"prefetching stopped early: {self.warmer.error}")
        return self.inner.end(landed)

    def verified(self) -> dict[str, Any]:
        return self.inner.verified()

    def close(self) -> None:
        """End the threads, whatever they are at."""
        self.warmer.cancel()
        self.inner.close()


def _wanted(items: Iterable[Extent | Place]) -> int:
    return sum(item.rows * item.row_bytes for item in items)


def _ranges(found: dict[int, tuple[File, list[tuple[int, int]]]]) -> list[tuple[File, int, int]]:
    """Ranges of local files by file name and offset."""
    files = sorted(found.values(), key=lambda item: item[0].name)
    return [
        (file, start, end)
        for file, ranges in files
        if file.path is not None
        for start, end in merged(ranges)
    ]
