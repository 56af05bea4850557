"""Boxes that are a partition of a tensor, and boxes that are not."""

from __future__ import annotations

import random
import time

import pytest
import torch

from loadkit_dcp.metadata import Box
from loadkit_dcp.partition import MAX_KNOT, fault_of


def boxes(*given: tuple[tuple[int, ...], tuple[int, ...]]) -> list[Box]:
    return [Box(offsets, sizes) for offsets, sizes in given]


def painted(size: tuple[int, ...], parts: list[Box]) -> torch.Tensor:
    """How often each element is in a box."""
    counts = torch.zeros(size, dtype=torch.int64)
    for box in parts:
        where = tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))
        counts[where] += 1
    return counts


def test_every_answer_is_what_painting_says() -> None:
    """Random grids, with boxes merged, moved, doubled or taken out."""
    rng = random.Random(3)
    wrong = 0
    for _ in range(600):
        dims = rng.randint(1, 3)
        size = tuple(rng.randint(1, 6) for _ in range(dims))
        parts = [Box((0,) * dims, size)]
        for _ in range(rng.randint(0, 6)):
            box = parts.pop(rng.randrange(len(parts)))
            dim = rng.randrange(dims)
            if box.sizes[dim] < 2:
                parts.append(box)
                continue
            cut = rng.randint(1, box.sizes[dim] - 1)
            first = list(box.sizes)
            first[dim] = cut
            second, start = list(box.sizes), list(box.offsets)
            second[dim] -= cut
            start[dim] += cut
            parts += [Box(box.offsets, tuple(first)), Box(tuple(start), tuple(second))]
        if rng.random() < 0.5:
            at = rng.randrange(len(parts))
            box = parts[at]
            sizes = tuple(rng.randint(1, n) for n in size)
            offsets = tuple(rng.randint(0, n - m) for n, m in zip(size, sizes, strict=True))
            parts[at] = Box(offsets, sizes)
            if rng.random() < 0.3:
                parts.append(box)
        rng.shuffle(parts)
        counts = painted(size, parts)
        fault = fault_of(size, parts)
        assert (fault is None) == bool((counts == 1).all()), (size, parts, fault)
        if fault is not None and "not all" not in fault.what:
            wrong += 1
            assert counts[fault.at] == (0 if "no box" in fault.what else 2) or (
                "two" in fault.what and counts[fault.at] > 1
            ), (size, parts, fault)
    assert wrong > 100


def test_boxes_wound_around_each_other_are_a_partition() -> None:
    """No straight cut separates these five."""
    wheel = boxes(((0, 0), (1, 2)), ((0, 2), (2, 1)), ((1, 0), (2, 1)), ((2, 1), (1, 2)),
                  ((1, 1), (1, 1)))  # fmt: skip
    assert fault_of((3, 3), wheel) is None
    assert fault_of((3, 3), wheel[:4]) is not None


@pytest.mark.parametrize(
    ("size", "parts", "good"),
    [
        pytest.param((), boxes(((), ())), True, id="a scalar"),
        pytest.param((), [], False, id="no scalar"),
        pytest.param((0, 4), [], True, id="nothing is all of nothing"),
        pytest.param((4,), [], False, id="no box at all"),
    ],
)
def test_scalars_and_empty_tensors(size: tuple[int, ...], parts: list[Box], good: bool) -> None:
    assert (fault_of(size, parts) is None) == good


def test_many_boxes_take_no_time_however_they_lie() -> None:
    grid = [Box((row, column), (1, 1)) for row in range(128) for column in range(128)]
    stairs = [Box((n, 0), (1, n + 1)) for n in range(4000)]
    knot = [Box((n, n), (2, 2)) for n in range(MAX_KNOT + 1)]
    peeled, at, left = [], [0, 0], [2000, 2000]
    for n in range(3998):  # each cut takes a line off: as deep as there are boxes
        dim = n % 2
        sizes = list(left)
        sizes[dim] = 1
        peeled.append(Box(tuple(at), tuple(sizes)))
        at[dim] += 1
        left[dim] -= 1
    start = time.process_time()
    assert fault_of((128, 128), grid) is None
    assert fault_of((4000, 4000), stairs) is not None
    assert "entangled" in str(fault_of((MAX_KNOT + 2,) * 2, knot))
    assert fault_of((2000, 2000), peeled) is not None
    assert time.process_time() - start < 15
