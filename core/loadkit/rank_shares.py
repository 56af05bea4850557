"""Who of several ranks reads which bytes: each byte that anybody needs once, in rounds, evenly.

Every rank knows what all need, and computes the same shares. Offsets and sizes in bytes.

N ranks, S segments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from loadkit.readers.base import Place
from loadkit.readers.windows import merged
from loadkit.sources.base import File

__all__ = ["PAGE", "ROUND", "Needs", "Segment", "Shares", "Sweep", "in_order"]

ROUND = 24 << 20  # bytes that all ranks together read and exchange at once
PAGE = 4096  # shares end at such a place of a file: no page of it is read by two ranks


class Needs(NamedTuple):
    """What one rank needs: bytes to fill parameters with, and bytes to compare them with after."""

    first: Sequence[Place]
    late: Sequence[Place]


class Segment(NamedTuple):
    """Bytes ``[start, end)`` of a file that somebody needs; of one tensor."""

    file: File
    start: int
    end: int
    tensor: str


def in_order(places: Sequence[Place]) -> list[Place]:
    """Places by file and offset; equal on every rank for equal places."""
    return sorted(places, key=lambda p: (p.file.name, p.offset, p.file_stride, p.row_bytes, p.rows))


class Shares:
    """The bytes that some ranks need together, cut into rounds, and each round into N parts.

    Rounds go through the files in order, what is only compared comes last; rank r reads part r of
    each round. A part ends at a page of its file, or where a segment does.

    Args:
        needs: every rank's, in rank order.
        budget: bytes of one round; 0: ``ROUND``.
    """

    def __init__(self, needs: Sequence[Needs], *, budget: int = 0) -> None:
        self.ranks = len(needs)
        self.budget = budget or ROUND
        first = _union([place for each in needs for place in each.first])
        late = _union([place for each in needs for place in each.late])
        late = list(_without(late, first))
        self.segments = [*first, *late]
        self.first_late = len(first)  # the segment that what is compared begins with
        ends = np.cumsum([0, *(s.end - s.start for s in self.segments)], dtype=np.int64)
        self._begin = ends[:-1]
        self.nbytes = int(ends[-1])
        self._cuts = self._cut(self.budget)

    @property
    def rounds(self) -> int:
        """How many rounds it takes."""
        return (len(self._cuts) - 1) // self.ranks

    def part(self, number: int, rank: int) -> Iterator[tuple[int, Segment]]:
        """What a rank reads in a round: segments, each with its number in ``segments``."""
        at = number * self.ranks + rank
        low, high = int(self._cuts[at]), int(self._cuts[at + 1])
        index = int(np.searchsorted(self._begin, low, side="right")) - 1
        while low < high:
            whole, begin = self.segments[index], int(self._begin[index])
            start, end = whole.start + low - begin, min(whole.end, whole.start + high - begin)
            yield index, whole._replace(start=start, end=end)
            low += end - start
            index += 1

    def _cut(self, budget: int) -> np.ndarray:
        """Where each part of each round begins, in bytes of the union, and the end."""
        rounds = -(-self.nbytes // budget)
        sizes = np.full(rounds, budget, dtype=np.int64)
        if rounds:
            sizes[-1] = self.nbytes - (rounds - 1) * budget
        begins = np.arange(rounds, dtype=np.int64)[:, None] * budget
        at = (begins + np.arange(self.ranks) * sizes[:, None] // self.ranks).reshape(-1)
        if len(at):
            index = np.searchsorted(self._begin, at, side="right") - 1
            start = np.array([s.start for s in self.segments], dtype=np.int64)[index]
            end = np.array([s.end for s in self.segments], dtype=np.int64)[index]
            offset = start + at - self._begin[index]
            offset = np.minimum(end, -(-offset // PAGE) * PAGE)
            at = self._begin[index] + offset - start
            at[0] = 0
        return np.append(at, self.nbytes)


class Sweep:
    """Places in order, gone through once: which of them lie in one range after the other."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = places
        self._drawn = 0
        self._near: list[int] = []

    def meeting(self, segment: Segment) -> list[int]:
        """The numbers of the places that a range meets; ranges come in order."""
        name, end = segment.file.name, segment.end
        places = self._places
        near = [at for at in self._near if _goes_past(places[at], name, segment.start)]
        while self._drawn < len(places):
            place = places[self._drawn]
            if (place.file.name, place.offset) >= (name, end):
                break
            if _goes_past(place, name, segment.start):
                near.append(self._drawn)
            self._drawn += 1
        self._near = near
        return near


def _goes_past(place: Place, name: str, offset: int) -> bool:
    """Whether a place has bytes of a file behind an offset."""
    return place.file.name == name and _end(place) > offset


def _end(place: Place) -> int:
    return place.offset + (place.rows - 1) * place.file_stride + place.row_bytes


def _union(places: Sequence[Place]) -> list[Segment]:
    """All bytes of some places, each once, in order; of one tensor each, neighbours in one."""
    found: list[Segment] = []
    group: list[Place] = []
    end = 0
    for place in in_order([p for p in places if p.rows and p.row_bytes]):
        if group and (place.file.name != group[0].file.name or place.offset >= end):
            found += _of_group(group, end)
            group = []
        end = max(end, _end(place)) if group else _end(place)
        group.append(place)
    return found + (list(_of_group(group, end)) if group else [])


def _of_group(group: list[Place], end: int) -> Iterator[Segment]:
    """The union of places that overlap; what lies between their rows is left out."""
    first = group[0]
    if any(_is_run(p) and p.offset == first.offset and _end(p) == end for p in group):
        yield Segment(first.file, first.offset, end, first.tensor)
        return
    distinct = {place[1:5]: place for place in group}.values()
    rows = [np.arange(p.rows, dtype=np.int64) * p.file_stride + p.offset for p in distinct]
    starts = np.concatenate(rows)
    sizes = [np.full(p.rows, p.row_bytes, dtype=np.int64) for p in distinct]
    ends = starts + np.concatenate(sizes)
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    new = np.flatnonzero(np.append(True, starts[1:] > reach[:-1]))
    last = np.append(new[1:] - 1, len(starts) - 1)
    for start, stop in zip(starts[new].tolist(), reach[last].tolist(), strict=True):
        yield Segment(first.file, start, stop, first.tensor)


def _is_run(place: Place) -> bool:
    return place.rows == 1 or place.file_stride <= place.row_bytes


def _without(segments: list[Segment], taken: list[Segment]) -> Iterator[Segment]:
    """What of some segments is in none of others; both in order."""
    gone: dict[str, list[tuple[int, int]]] = {}
    for each in taken:
        gone.setdefault(each.file.name, []).append((each.start, each.end))
    gone = {name: merged(ranges) for name, ranges in gone.items()}
    at: dict[str, int] = {}
    for segment in segments:
        name, start = segment.file.name, segment.start
        ranges = gone.get(name, [])
        index = at.get(name, 0)
        while index < len(ranges) and ranges[index][1] <= start:
            index += 1
        at[name] = index
        while index < len(ranges) and ranges[index][0] < segment.end:
            low, high = ranges[index]
            if start < low:
                yield segment._replace(start=start, end=low)
            start = max(start, high)
            index += 1
        if start < segment.end:
            yield segment._replace(start=start)
