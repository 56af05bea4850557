"""Whether boxes are a partition of a tensor: every element in exactly one of them.

A whole is cut along every plane that no box crosses, and the pieces again, until each is one box:
meshes, however they were nested, come apart so. What does not is compared pair by pair, up to a
limit. Work is counted, and its limit grows with the boxes, so that no metadata takes long.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import prod
from typing import NamedTuple

from loadkit_dcp.metadata import Box

__all__ = ["Fault", "fault_of"]

MAX_WORK = 5_000_000  # boxes that are looked at, again and again
LOOKS = 64  # at each box in each dimension; one of a mesh is looked at once for each dimension
MAX_KNOT = 128  # boxes that no plane separates; five are one in the plane


class Fault(NamedTuple):
    """What is wrong with the boxes, and where: the first index of it."""

    what: str
    at: tuple[int, ...]


def fault_of(size: tuple[int, ...], boxes: Sequence[Box]) -> Fault | None:
    """None where the boxes, all inside of ``size`` and none empty, are all of it, each part once.

    Args:
        size: of the whole, in elements.
        boxes: in any order.
    """
    if not prod(size):
        return None
    work, most = 0, min(MAX_WORK, 10_000 + LOOKS * len(boxes) * len(size))
    left: list[tuple[tuple[int, ...], tuple[int, ...], list[Box]]] = []
    left.append((tuple(0 for _ in size), size, list(boxes)))
    while left:
        start, extent, inside = left.pop()
        if not inside:
            return Fault("is in no box", start)
        if len(inside) == 1:
            fault = _one(start, extent, inside[0])
            if fault is not None:
                return fault
            continue
        work += len(inside) * len(size)
        if work > most:
            return Fault("is in boxes too entangled to be checked", start)
        for dim in range(len(size)):
            groups = _apart(inside, dim)
            if len(groups) > 1:
                break
        else:
            fault = _knot(start, extent, inside)
            if fault is not None:
                return fault
            continue
        at = start[dim]
        for low, high, group in groups:
            if low > at:
                return Fault("is in no box", _moved(start, dim, at))
            left.append((_moved(start, dim, low), _moved(extent, dim, high - low), group))
            at = high
        if at < start[dim] + extent[dim]:
            return Fault("is in no box", _moved(start, dim, at))
    return None


def _moved(numbers: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*numbers[:dim], value, *numbers[dim + 1 :])


def _one(start: tuple[int, ...], extent: tuple[int, ...], box: Box) -> Fault | None:
    """A single box has to be all of its piece."""
    if (box.offsets, box.sizes) == (start, extent):
        return None
    for dim, (at, low) in enumerate(zip(box.offsets, start, strict=True)):
        if at > low:
            return Fault("is in no box", start)
        if box.sizes[dim] < extent[dim]:
            return Fault("is in no box", _moved(start, dim, at + box.sizes[dim]))
    return Fault("is in no box", start)


def _apart(boxes: list[Box], dim: int) -> list[tuple[int, int, list[Box]]]:
    """The boxes in groups that share no index of a dimension: first, end, boxes."""
    groups: list[tuple[int, int, list[Box]]] = []
    for box in sorted(boxes, key=lambda one: one.offsets[dim]):
        low, high = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
        if groups and low < groups[-1][1]:
            first, end, inside = groups[-1]
            inside.append(box)
            groups[-1] = (first, max(end, high), inside)
        else:
            groups.append((low, high, [box]))
    return groups


def _knot(start: tuple[int, ...], extent: tuple[int, ...], boxes: list[Box]) -> Fault | None:
    """Boxes that no plane separates: two of them overlap, or they are wound around each other."""
    if len(boxes) > MAX_KNOT:
        return Fault("is in boxes too entangled to be checked", start)
    for one, other in combinations(boxes, 2):
        at = tuple(map(max, one.offsets, other.offsets))
        ends = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
        if all(low < min(a + n, b + m) for low, (a, n, b, m) in zip(at, ends, strict=True)):
            return Fault("is in two boxes", at)
    if sum(box.numel for box in boxes) != prod(extent):
        return Fault("is not all in boxes", start)
    return None
