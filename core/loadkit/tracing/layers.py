"""A storage's writes by place, so that the last one to touch a region is found at once.

Writes are kept in layers, oldest first; the writes of one layer lie apart, so their order does not
matter. A fused parameter of a thousand parts is one layer, whatever order the parts came in.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

from loadkit.tracing.storage import Storage, Write
from loadkit.tracing.view import DISJOINT, Relation, View, relate

__all__ = ["last_write", "layers_of"]


@dataclass(slots=True)
class Layer:
    """Writes that share no bytes, by place: first bytes, and (end, index of the write)."""

    starts: list[int] = field(default_factory=list)
    rows: list[tuple[int, int]] = field(default_factory=list)

    def add(self, start: int, end: int, index: int) -> bool:
        """Take a write in, if it lies apart from the others."""
        at = bisect_right(self.starts, start)
        if at and self.rows[at - 1][0] > start:
            return False
        if at < len(self.starts) and self.starts[at] < end:
            return False
        self.starts.insert(at, start)
        self.rows.insert(at, (end, index))
        return True

    def near(self, start: int, end: int) -> Iterator[int]:
        """Writes that may touch the bytes [start, end): the middle one first, then around it."""
        low = bisect_right(self.starts, start) - 1
        if low < 0 or self.rows[low][0] <= start:
            low += 1
        high = bisect_left(self.starts, end)
        middle = (low + high) // 2
        for at in (*range(middle, high), *range(middle - 1, low - 1, -1)):
            yield self.rows[at][1]


@dataclass(slots=True)
class Layers:
    """The layers of the first ``count`` writes."""

    count: int = 0
    layers: list[Layer] = field(default_factory=list)

    def extend(self, writes: list[Write]) -> None:
        """Take in the writes that came since."""
        for index in range(self.count, len(writes)):
            view = writes[index].view
            if view.numel and not (self.layers and self.layers[-1].add(*view.span(), index)):
                self.layers.append(Layer())
                self.layers[-1].add(*view.span(), index)
        self.count = len(writes)


def layers_of(storage: Storage) -> list[Layer]:
    """A storage's layers, brought up to date."""
    found = storage.layers
    if not isinstance(found, Layers):
        found = storage.layers = Layers()
    if found.count != len(storage.writes):
        found.extend(storage.writes)
    return found.layers


def last_write(
    storage: Storage, version: int, depth: int, region: View
) -> tuple[Write, Relation, int] | None:
    """The last of the first ``version`` writes, not above layer ``depth``, to touch a region.

    Returns:
        (write, how the region lies to it, depth at which its untouched parts are looked for next).
    """
    layers = layers_of(storage)
    start, end = region.span()
    for at in range(min(depth, len(layers)) - 1, -1, -1):
        for index in layers[at].near(start, end):
            if index >= version:
                continue
            relation = relate(storage.writes[index].view, region)
            if relation is not DISJOINT:
                return storage.writes[index], relation, at + 1
    return None
