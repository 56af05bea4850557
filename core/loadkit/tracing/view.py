"""Strided regions of a storage, and how two of them relate. Plain integers, no tensors.

All sizes, strides and offsets are in elements of ``itemsize`` bytes; strides are never negative.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

__all__ = ["DISJOINT", "UNKNOWN", "Inside", "Relation", "Split", "View", "contiguous", "relate"]


class View(NamedTuple):
    """Elements ``offset + sum(i_d * stride[d])`` for every index below ``size``."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    itemsize: int

    @property
    def numel(self) -> int:
        return prod(self.size)

    def span(self) -> tuple[int, int]:
        """First byte, and the byte after the last one, that the view touches."""
        if 0 in self.size:
            return self.offset * self.itemsize, self.offset * self.itemsize
        last = self.offset + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        return self.offset * self.itemsize, (last + 1) * self.itemsize

    def narrow(self, dim: int, start: int, length: int) -> View:
        """The part ``[start, start + length)`` of dimension ``dim``."""
        size = (*self.size[:dim], length, *self.size[dim + 1 :])
        return View(size, self.stride, self.offset + start * self.stride[dim], self.itemsize)

    def expand(self, size: Sequence[int]) -> View:
        """Broadcast to ``size`` (new leading dimensions and size-1 ones get stride 0).

        Raises:
            ValueError: it does not broadcast.
        """
        size = tuple(size)
        if size == self.size:
            return self
        lead = len(size) - len(self.size)
        if lead < 0 or any(
            n not in (1, want) for n, want in zip(self.size, size[lead:], strict=True)
        ):
            raise ValueError(f"{list(self.size)} does not broadcast to {list(size)}")
        stride = [
            s if n == want else 0
            for n, s, want in zip(self.size, self.stride, size[lead:], strict=True)
        ]
        return View(size, (0,) * lead + tuple(stride), self.offset, self.itemsize)

    def is_contiguous(self) -> bool:
        """Row-major without gaps."""
        if self.stride == _row_major(self.size):
            return True
        expect = 1
        for n, s in zip(reversed(self.size), reversed(self.stride), strict=True):
            if n != 1 and s != expect:
                return False
            expect *= n
        return True

    def is_apart(self) -> bool:
        """No two elements are one in memory (interleaved dimensions count as if they were)."""
        if self.is_contiguous():
            return True
        reach = 0
        for s, n in sorted(zip(self.stride, self.size, strict=True)):
            if n > 1:
                if s <= reach:
                    return False
                reach += (n - 1) * s
        return True

    def runs(self) -> Iterator[tuple[int, int]]:
        """(first element, count) of each contiguous run; for few runs only."""
        dims, run = self.coalesced()
        starts = [self.offset]
        for n, s in dims:
            starts = [at + i * s for at in starts for i in range(n)]
        return ((at, run) for at in starts)

    def coalesced(self) -> tuple[list[tuple[int, int]], int]:
        """Outer (count, stride) pairs by falling stride, and the length of a contiguous run.

        A view of the same *set* of elements; the order of elements is not kept.
        """
        dims = sorted(
            ((s, n) for n, s in zip(self.size, self.stride, strict=True) if n != 1 and s),
            reverse=True,
        )
        run = 1
        while dims and dims[-1][0] == run:
            run *= dims.pop()[1]
        merged: list[tuple[int, int]] = []
        for s, n in dims:
            if merged and merged[-1][1] == s * n:
                merged[-1] = (merged[-1][0] * n, s)
            else:
                merged.append((n, s))
        return merged, run


def contiguous(size: Sequence[int], itemsize: int, offset: int = 0) -> View:
    """The row-major view of ``size``."""
    size = tuple(size)
    return View(size, _row_major(size), offset, itemsize)


@lru_cache(maxsize=1 << 12)
def _row_major(size: tuple[int, ...]) -> tuple[int, ...]:
    """Strides without gaps. A checkpoint has few sizes and many tensors of each."""
    stride: list[int] = []
    step = 1
    for n in reversed(size):
        stride.append(step)
        step *= max(n, 1)
    return tuple(reversed(stride))


class Inside(NamedTuple):
    """Every element of the inner view lies in the outer one.

    ``size`` is the inner view's size, dimensions split where they cross the outer one's; ``stride``
    its strides then. ``dims[j]`` says which dimension of the outer view dimension j walks (None: it
    does not move) and by how many steps; ``starts`` where it begins, per outer dimension.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dims: tuple[tuple[int | None, int], ...]
    starts: tuple[tuple[int, int], ...]

    def apply(self, over: View) -> View:
        """The same elements' places in ``over``, any view of the outer one's size."""
        offset = over.offset + sum(start * over.stride[dim] for dim, start in self.starts)
        stride = tuple(0 if dim is None else step * over.stride[dim] for dim, step in self.dims)
        return View(self.size, stride, offset, over.itemsize)


class Split(NamedTuple):
    """The inner view, re-dimensioned as ``view``, must be cut along ``dim`` at ``cuts`` first."""

    view: View
    dim: int
    cuts: tuple[int, ...]

    def parts(self) -> list[View]:
        """The pieces, in order."""
        edges = (0, *self.cuts, self.view.size[self.dim])
        return [
            self.view.narrow(self.dim, a, b - a) for a, b in zip(edges, edges[1:], strict=False)
        ]


class _Word(str):
    __slots__ = ()


DISJOINT = _Word("disjoint")
UNKNOWN = _Word("unknown")
Relation = Inside | Split | _Word


class _Frame(NamedTuple):
    """Coordinates in which the outer view is a box: falling strides that divide one another."""

    strides: list[int]
    low: list[int]
    high: list[int]
    dims: list[int | None]
    base: int

    def periods(self) -> list[int | None]:
        return [None, *(a // b for a, b in zip(self.strides, self.strides[1:], strict=False))]

    def coordinates(self, address: int) -> list[int]:
        rest = address - self.base
        out = []
        for stride in self.strides:
            at, rest = divmod(rest, stride)
            out.append(at)
        return out


def _frame(outer: View) -> _Frame | None:
    """The outer view's own frame, or None where it has none (overlapping or uneven strides)."""
    rows: list[tuple[int, int, int | None]] = sorted(
        (
            (s, n, d)
            for d, (n, s) in enumerate(zip(outer.size, outer.stride, strict=True))
            if n != 1
        ),
        reverse=True,
    )
    if not rows or rows[-1][0] != 1:
        rows.append((1, 1, None))
    strides = [row[0] for row in rows]
    if 0 in strides:
        return None
    for (a, _, _), (b, n, _) in zip(rows, rows[1:], strict=False):
        if a % b or b * n > a:
            return None
    dims = [row[2] for row in rows]
    frame = _Frame(strides, [], [], dims, 0)
    low = frame.coordinates(outer.offset)
    high = [at + row[1] for at, row in zip(low, rows, strict=True)]
    if any(p is not None and e > p for e, p in zip(high, frame.periods(), strict=True)):
        low = [0] * len(rows)
        return _Frame(strides, low, [row[1] for row in rows], dims, outer.offset)
    return _Frame(strides, low, high, dims, 0)


def relate(outer: View, inner: View) -> Relation:
    """How ``inner`` lies to ``outer``: DISJOINT, Inside, Split (cut it first) or UNKNOWN.

    Exact whenever it does not say UNKNOWN. Empty views are the caller's business.
    """
    a, b = outer.span(), inner.span()
    if b[1] <= a[0] or b[0] >= a[1]:
        return DISJOINT
    if outer.itemsize != inner.itemsize:
        return UNKNOWN
    if outer == inner:
        dims = tuple((d, 1) for d in range(len(outer.size)))
        return Inside(outer.size, outer.stride, dims, ())
    frame = _frame(outer)
    if frame is None:
        return UNKNOWN
    return _relate_in(frame, inner)


def _relate_in(frame: _Frame, inner: View) -> Relation:
    periods = frame.periods()
    at = frame.coordinates(inner.offset)
    size, stride = list(inner.size), list(inner.stride)
    placed: list[tuple[int | None, int]] = []
    j = 0
    while j < len(size):
        n, s = size[j], stride[j]
        if n == 1 or s == 0:
            placed.append((None, 0))
            j += 1
            continue
        i = next((i for i, f in enumerate(frame.strides) if f <= s and s % f == 0), None)
        if i is None:
            return UNKNOWN
        step, period = s // frame.strides[i], periods[i]
        if period is None or at[i] + (n - 1) * step < period:
            placed.append((i, step))
            j += 1
            continue
        if period % step:
            return UNKNOWN
        per = period // step
        if at[i] >= step or n % per:  # starts or ends inside a row of the frame: cut there
            first = -(-(period - at[i]) // step)
            cuts = {first, first + (n - first) // per * per} & set(range(1, n))
            if not cuts:
                return UNKNOWN
            view = View(tuple(size), tuple(stride), inner.offset, inner.itemsize)
            return Split(view, j, tuple(sorted(cuts)))
        size[j : j + 1] = [n // per, per]
        stride[j : j + 1] = [s * per, s]
    view = View(tuple(size), tuple(stride), inner.offset, inner.itemsize)
    return _compare(frame, view, at, placed)


def _compare(
    frame: _Frame, view: View, at: list[int], placed: list[tuple[int | None, int]]
) -> Relation:
    """The inner view's box against the outer one's, frame dimension by frame dimension."""
    periods = frame.periods()
    reach = list(at)
    for (i, step), n in zip(placed, view.size, strict=True):
        if i is not None:
            reach[i] += (n - 1) * step
    if any(p is not None and r >= p for r, p in zip(reach, periods, strict=True)):
        return UNKNOWN  # several dimensions together run over a row of the frame
    bounds = list(zip(at, reach, frame.low, frame.high, strict=True))
    if any(last < low or first >= high for first, last, low, high in bounds):
        return DISJOINT
    for i, (first, last, low, high) in enumerate(bounds):
        if first >= low and last < high:
            continue
        mine = [j for j, (k, _) in enumerate(placed) if k == i]
        outermost = max(mine, key=lambda j: placed[j][1])
        step = placed[outermost][1]
        inner_span = sum((view.size[j] - 1) * placed[j][1] for j in mine if j != outermost)
        if inner_span >= step:
            return UNKNOWN
        n = view.size[outermost]
        edges = {
            -(-(low - inner_span - first) // step),
            -(-(low - first) // step),
            -(-(high - inner_span - first) // step),
            -(-(high - first) // step),
        }
        cuts = tuple(sorted(e for e in edges if 0 < e < n))
        return Split(view, outermost, cuts) if cuts else UNKNOWN
    dims = tuple((None, 0) if i is None else (frame.dims[i], step) for i, step in placed)
    starts = tuple(
        (dim, first - low)
        for dim, first, low in zip(frame.dims, at, frame.low, strict=True)
        if dim is not None and first != low
    )
    return Inside(view.size, view.stride, dims, starts)
