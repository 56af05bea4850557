"""Shares of several ranks: each byte that anybody needs once, evenly, and found by who needs it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loadkit.distribute import Distribution
from loadkit.rank_needs import decode, encode
from loadkit.rank_shares import PAGE, Needs, Segment, Shares, Sweep, in_order
from loadkit.readers.base import Place
from loadkit.readers.windows import cut
from loadkit.sources.base import File


class Bytes(File):
    """A file of numbers that tell their place."""

    def __init__(self, name: str, size: int = 1 << 16) -> None:
        self.name = name
        self.size = size

    def read(self, offset: int, nbytes: int) -> bytes:
        return bytes((np.arange(offset, offset + nbytes) % 251).astype("u1"))

    def fileno(self) -> int:
        raise OSError

    def check_unchanged(self) -> None:
        return

    def close(self) -> None:
        return


FILES = [Bytes("a"), Bytes("b")]


@st.composite
def places(draw: st.DrawFn) -> Place:
    rows = draw(st.integers(1, 6))
    row_bytes = draw(st.integers(1, 400))
    stride = draw(st.integers(0, 900)) if rows > 1 else row_bytes
    offset = draw(st.integers(0, 9000))
    return Place(draw(st.sampled_from(FILES)), offset, row_bytes, rows, stride, "t")


def needs() -> st.SearchStrategy[list[Needs]]:
    one = st.builds(Needs, st.lists(places(), max_size=5), st.lists(places(), max_size=2))
    return st.lists(one, min_size=1, max_size=4)


def touched(where: list[Place]) -> set[tuple[str, int]]:
    return {
        (place.file.name, place.offset + row * place.file_stride + byte)
        for place in where
        for row in range(place.rows)
        for byte in range(place.row_bytes)
    }


def read_by(shares: Shares) -> list[list[tuple[int, Segment]]]:
    return [
        [each for number in range(shares.rounds) for each in shares.part(number, rank)]
        for rank in range(shares.ranks)
    ]


@given(needs(), st.integers(1, 3000))
def test_every_byte_that_a_rank_needs_is_read_once(every: list[Needs], budget: int) -> None:
    shares = Shares(every, budget=budget)
    count = Counter(
        (segment.file.name, byte)
        for mine in read_by(shares)
        for _, segment in mine
        for byte in range(segment.start, segment.end)
    )
    wanted = touched([place for each in every for place in (*each.first, *each.late)])
    assert set(count) == wanted
    assert set(count.values()) <= {1}
    assert shares.nbytes == len(wanted)
    first = touched([place for each in every for place in each.first])
    late = {
        (segment.file.name, byte)
        for segment in shares.segments[shares.first_late :]
        for byte in range(segment.start, segment.end)
    }
    assert late == wanted - first


def test_parts_are_even_and_end_at_pages() -> None:
    whole = Place(FILES[0], 100, 1 << 20, 1, 1 << 20, "t")
    shares = Shares([Needs([whole], [])] * 4, budget=1 << 18)
    parts = read_by(shares)
    sizes = [sum(segment.end - segment.start for _, segment in mine) for mine in parts]
    assert sum(sizes) == 1 << 20
    assert max(sizes) - min(sizes) <= 2 * PAGE
    ends = [segment.end for mine in parts for _, segment in mine]
    assert all(end % PAGE == 0 or end == 100 + (1 << 20) for end in ends)
    assert shares.rounds == 4


def test_the_columns_of_all_ranks_are_one_run() -> None:
    columns = [Place(FILES[0], 64 + rank * 16, 16, 1000, 64, "t") for rank in range(4)]
    shares = Shares([Needs([each], []) for each in columns])
    assert [(s.start, s.end) for s in shares.segments] == [(64, 64 + 64_000)]
    alone = Shares([Needs([columns[0]], [])])
    assert (len(alone.segments), alone.nbytes) == (1000, 16_000)


def test_nobody_who_needs_nothing_reads() -> None:
    shares = Shares([Needs([], []), Needs([], [])])
    assert (shares.rounds, shares.nbytes) == (0, 0)


@given(st.lists(places(), max_size=12), st.lists(places(), min_size=1, max_size=6))
def test_a_sweep_finds_every_place_that_a_range_meets(
    where: list[Place], ranges: list[Place]
) -> None:
    where = in_order(where)
    sweep = Sweep(where)
    shares = Shares([Needs(ranges, [])], budget=700)
    for segment in (each for mine in read_by(shares) for _, each in mine):
        found = set(sweep.meeting(segment))
        meets = {
            number
            for number, place in enumerate(where)
            if place.file is segment.file and any(cut(place, segment.start, segment.end))
        }
        assert meets <= found


@given(needs())
def test_needs_travel(every: list[Needs]) -> None:
    by_name = {file.name: file for file in FILES}
    for each in every:
        found = decode(encode(each), by_name.__getitem__)
        assert (list(found.first), list(found.late)) == (list(each.first), list(each.late))


def test_the_memory_of_an_exchange_does_not_grow_with_the_checkpoint() -> None:
    big = Place(FILES[0], 0, 1 << 40, 1, 1 << 40, "t")
    for ranks in (2, 8):
        shares = Shares([Needs([big], [])] * ranks)
        share: Any = Distribution(None, 0, None, [], shares)  # type: ignore[arg-type]
        assert share.staging_bytes <= 73 << 20


def test_a_round_is_a_whole_number_of_parts() -> None:
    torch.manual_seed(0)
    sizes = torch.randint(1, 100_000, (50,)).tolist()
    at, where = 0, []
    for size in sizes:
        where.append(Place(FILES[0], at, size, 1, size, "t"))
        at += size + 7
    shares = Shares([Needs(where, [])] * 3, budget=1 << 17)
    assert shares.rounds == -(-sum(sizes) // (1 << 17))
    with pytest.raises(IndexError):
        list(shares.part(shares.rounds, 0))
