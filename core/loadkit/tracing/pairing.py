"""Two views of one size, as runs of bytes: what a reader can move without anybody's arithmetic."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from loadkit.tracing.view import View

__all__ = ["MAX_STRIPS", "Strip", "dense_order", "pair"]

MAX_STRIPS = 4096  # beyond it a strided copy in memory is cheaper than a list of pieces


class Strip(NamedTuple):
    """``rows`` runs of ``row_bytes``; offsets and strides in bytes from either storage's start."""

    source: int
    target: int
    row_bytes: int
    rows: int
    source_stride: int
    target_stride: int


def pair(source: View, target: View) -> list[Strip] | None:
    """The strips that copy ``source`` to ``target`` (equal sizes), or None where none would do.

    None: elements that are neighbours on one side are none on the other, one element of the source
    lands several times, or it takes more than ``MAX_STRIPS`` strips.
    """
    if source.is_contiguous() and target.is_contiguous():  # nearly all are
        nbytes, itemsize = source.numel * source.itemsize, source.itemsize
        ends = source.offset * itemsize, target.offset * itemsize
        return [Strip(*ends, nbytes, 1, nbytes, nbytes)]
    dims = sorted(
        (
            (s, t, n)
            for n, s, t in zip(source.size, source.stride, target.stride, strict=True)
            if n != 1
        ),
        reverse=True,
    )
    merged: list[tuple[int, int, int]] = []
    for s, t, n in dims:
        if merged and merged[-1][0] == s * n and merged[-1][1] == t * n:
            merged[-1] = (s, t, merged[-1][2] * n)
        else:
            merged.append((s, t, n))
    run = 1
    if merged and merged[-1][:2] == (1, 1):
        run = merged.pop()[2]
    elif merged:
        return None
    if any(s == 0 or t == 0 for s, t, _ in merged):
        return None
    size = source.itemsize
    rows, row_s, row_t = 1, run * size, run * size
    if merged:
        s, t, rows = merged.pop()
        row_s, row_t = s * size, t * size
    count = 1
    for _, _, n in merged:
        count *= n
    if count > MAX_STRIPS:
        return None
    strips = []
    for at in product(*(range(n) for _, _, n in merged)):
        from_ = source.offset + sum(i * s for i, (s, _, _) in zip(at, merged, strict=True))
        to = target.offset + sum(i * t for i, (_, t, _) in zip(at, merged, strict=True))
        strips.append(Strip(from_ * size, to * size, run * size, rows, row_s, row_t))
    return strips


def dense_order(source: View) -> tuple[View, View] | None:
    """A source view without repeats, dimensions by falling stride, and a dense view to read into.

    Both walk the same elements in file order; the second one's strides, put back in the caller's
    order, show the elements as ``source`` does. None if dimensions overlap or interleave.
    """
    order = sorted(range(len(source.size)), key=lambda d: -source.stride[d])
    size = tuple(source.size[d] if source.stride[d] else 1 for d in order)
    stride = tuple(source.stride[d] for d in order)
    reach = 0  # of all dimensions below the one looked at
    for n, s in zip(reversed(size), reversed(stride), strict=True):
        if n != 1 and s <= reach:
            return None
        reach += (n - 1) * s
    dense: list[int] = []
    step = 1
    for n in reversed(size):
        dense.append(step)
        step *= n
    dense.reverse()
    back = [0] * len(order)
    for place, d in enumerate(order):
        back[d] = dense[place] if source.stride[d] else 0
    sorted_view = View(size, stride, source.offset, source.itemsize)
    return sorted_view, View(source.size, tuple(back), 0, source.itemsize)
