"""The pieces of one rank's share that another rank needs, in an order that both ends know."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from loadkit.rank_shares import Segment, Sweep
from loadkit.readers.base import Place
from loadkit.readers.windows import Cut, cut

__all__ = ["Piece", "Sweeps", "one_run"]


class Piece(NamedTuple):
    """A cut of the place with a number, and where its first row begins in the reader's buffer."""

    number: int
    part: Cut
    at: int


class Sweeps:
    """One rank's places, gone through once for each pass over the files."""

    def __init__(self, every: Sequence[Place], late: Sequence[Place]) -> None:
        self.places = every
        numbers: dict[Place, list[int]] = {}
        for number, place in enumerate(every):
            numbers.setdefault(place, []).append(number)
        self._late = [numbers[place].pop() for place in reversed(late)][::-1]
        self._passes = (Sweep(every), Sweep(late))

    def pieces(self, part: Sequence[tuple[int, Segment]], first_late: int) -> Iterator[Piece]:
        """What of a part of a round the rank needs, in an order that both ends know."""
        at = 0
        for index, segment in part:
            is_late = index >= first_late
            for found in self._passes[is_late].meeting(segment):
                number = self._late[found] if is_late else found
                place = self.places[number]
                for each in cut(place, segment.start, segment.end):
                    begin = place.offset + each.row * place.file_stride + each.column
                    yield Piece(number, each, at + begin - segment.start)
            at += segment.end - segment.start


def one_run(pieces: Sequence[tuple[int, int, Cut]]) -> int | None:
    """Where pieces begin that lie one after the other in a buffer without a gap; else None."""
    end = start = pieces[0][0]
    for at, stride, part in pieces:
        if at != end or (part.rows > 1 and stride != part.nbytes):
            return None
        end += part.rows * part.nbytes
    return start
