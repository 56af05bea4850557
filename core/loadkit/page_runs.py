"""Which pages of a target's memory can be pages of files.

A strip that is one run of bytes needs no copy if it lies in the file's pages as it would lie in
those of memory: then the pages are mapped. What is left is read: the ends of runs, where two meet
in one page, what is short, and what lies differently in its pages.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from loadkit.readers.pages import PAGE, runs_held
from loadkit.tracing.pairing import Strip
from loadkit.tracing.storage import FileLeaf

if TYPE_CHECKING:
    from loadkit.sources.base import File

__all__ = ["MOST_OF_PROCESS", "MOST_RUNS", "PageRun", "Pages", "pages_of", "runs_left"]

MOST_RUNS = 8192  # of one load
MOST_OF_PROCESS = 16384  # of all that live; each splits memory in up to three of Linux's 65,530
SHORTEST = 128 << 10  # bytes; what a mapping saves is the copy of them

Piece = tuple[FileLeaf, Strip]


class PageRun(NamedTuple):
    """Whole pages of a file that become a storage's, from byte ``target`` on. All in bytes."""

    file: File
    offset: int
    target: int
    nbytes: int


class Pages(NamedTuple):
    """``phase``: where in its page a storage begins; ``runs``: what is mapped, in order."""

    phase: int
    runs: tuple[PageRun, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that are mapped."""
        return sum(run.nbytes for run in self.runs)


def pages_of(strips: Sequence[Piece], itemsize: int) -> tuple[Pages, list[Piece]]:
    """The pages of a storage that are mapped, of those that may be the most, and what is read.

    Args:
        strips: what goes into the storage, each with the tensor it comes from.
        itemsize: bytes of an element: the storage begins at a multiple of it.
    """
    found: dict[int, list[PageRun]] = {}
    for file, offset, target, nbytes in _joined(strips):
        phase = (offset - target) % PAGE
        start = -(-offset // PAGE) * PAGE
        end = (offset + nbytes) // PAGE * PAGE
        if end - start >= SHORTEST and phase % itemsize == 0:
            run = PageRun(file, start, target + start - offset, end - start)
            found.setdefault(phase, []).append(run)
    if not found:
        return Pages(0, ()), list(strips)
    best = max(
        (Pages(phase, tuple(runs)) for phase, runs in found.items()), key=lambda pages: pages.nbytes
    )
    ends = [run.target + run.nbytes for run in best.runs]
    return best, [piece for item in strips for piece in _outside(item, best.runs, ends)]


def runs_left() -> int:
    """How many runs a load may map now, beside those of loads whose models still live."""
    return max(0, min(MOST_RUNS, MOST_OF_PROCESS - runs_held()))


def _joined(strips: Sequence[Piece]) -> Iterator[tuple[File, int, int, int]]:
    """Runs (file, offset, target, bytes) in the order of memory; neighbours in both are one."""
    file, offset, target, nbytes = None, 0, 0, 0
    for leaf, strip in sorted(strips, key=lambda item: item[1].target):
        if not _is_run(strip):
            continue
        start, length = leaf.info.offset + strip.source, strip.rows * strip.row_bytes
        near = start == offset + nbytes and strip.target == target + nbytes
        if leaf.info.file is file and near:
            nbytes += length
            continue
        if file is not None:
            yield file, offset, target, nbytes
        file, offset, target, nbytes = leaf.info.file, start, strip.target, length
    if file is not None:
        yield file, offset, target, nbytes


def _is_run(strip: Strip) -> bool:
    return strip.rows == 1 or strip.row_bytes == strip.source_stride == strip.target_stride


def _outside(item: Piece, runs: Sequence[PageRun], ends: Sequence[int]) -> Iterator[Piece]:
    """The parts of a strip that are in no run; ``runs`` are in order, and end at ``ends``."""
    leaf, strip = item
    if not _is_run(strip):
        yield item
        return
    at, end = strip.target, strip.target + strip.rows * strip.row_bytes
    for number in range(bisect_right(ends, at), len(runs)):
        run = runs[number]
        if run.target >= end:
            break
        if run.target > at:
            yield leaf, _part(strip, at, run.target)
        at = run.target + run.nbytes
    if at < end:
        yield leaf, _part(strip, at, end)


def _part(strip: Strip, start: int, end: int) -> Strip:
    """The bytes of a run that go to ``[start, end)``."""
    nbytes = end - start
    return Strip(strip.source + start - strip.target, start, nbytes, 1, nbytes, nbytes)
