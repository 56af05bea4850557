"""Strided regions against their elements, one by one."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product

import pytest
import torch

from loadkit.tracing.pairing import dense_order, pair
from loadkit.tracing.view import (
    DISJOINT,
    UNKNOWN,
    Inside,
    Split,
    View,
    contiguous,
    relate,
)

SHAPES = [(6, 4), (12,), (2, 3, 4), (4, 6, 2), (3, 8), (2, 2, 2, 3), (1, 5, 2), (7,)]


def elements(view: View) -> list[int]:
    """Every element's place in the storage, row-major."""
    return [
        view.offset + sum(i * s for i, s in zip(at, view.stride, strict=True))
        for at in product(*(range(n) for n in view.size))
    ]


def loader_view(rng: random.Random, shape: tuple[int, ...], itemsize: int = 4) -> View:
    """What loader code makes of a row-major tensor: a chain of views."""
    t = torch.empty(contiguous(shape, itemsize).numel, device="meta").view(shape)
    for _ in range(rng.randint(0, 5)):
        if not t.dim():
            break
        d = rng.randrange(t.dim())
        n = t.size(d)
        kind = rng.choice(["narrow", "select", "transpose", "unflatten", "step", "merge", "expand"])
        if kind == "narrow":
            start = rng.randrange(n)
            t = t.narrow(d, start, rng.randint(1, n - start))
        elif kind == "select":
            t = t.select(d, rng.randrange(n))
        elif kind == "transpose":
            t = t.transpose(d, rng.randrange(t.dim()))
        elif kind == "unflatten":
            factor = next((f for f in (2, 3) if n % f == 0), None)
            t = t if factor is None else t.unflatten(d, (factor, n // factor))
        elif kind == "step":
            t = t[(slice(None),) * d + (slice(rng.randrange(n), None, rng.choice([2, 3])),)]
        elif kind == "expand":
            t = t.unsqueeze(d).expand(*t.shape[:d], 2, *t.shape[d:]) if t.numel() < 64 else t
        elif d + 1 < t.dim():
            try:
                t = t.view(*t.shape[:d], -1, *t.shape[d + 2 :])
            except RuntimeError:
                continue
    return View(tuple(t.size()), tuple(t.stride()), int(t.storage_offset()), itemsize)


def wild_view(rng: random.Random, itemsize: int = 4) -> View:
    """Any sizes, any strides: windows, repeats, gaps."""
    dims = rng.randint(0, 3)
    size = tuple(rng.randint(1, 4) for _ in range(dims))
    stride = tuple(rng.choice([0, 1, 1, 2, 3, 4, 5, 6, 8, 12]) for _ in range(dims))
    return View(size, stride, rng.randrange(12), itemsize)


def check_relation(outer: View, inner: View, seen: Counter[str]) -> None:
    relation = relate(outer, inner)
    seen[relation if isinstance(relation, str) else type(relation).__name__] += 1
    over, under = elements(outer), elements(inner)
    if relation is DISJOINT:
        assert not set(over) & set(under), (outer, inner)
    elif isinstance(relation, Inside):
        assert set(under) <= set(over), (outer, inner)
        places = relation.apply(contiguous(outer.size, 4))
        assert [over[at] for at in elements(places)] == under, (outer, inner, relation)
        assert elements(View(relation.size, relation.stride, inner.offset, 4)) == under
    elif isinstance(relation, Split):
        assert elements(relation.view) == under, (outer, inner, relation)
        parts = relation.parts()
        assert len(parts) > 1
        pieces = [set(elements(part)) for part in parts]
        assert sorted(e for p in parts for e in elements(p)) == sorted(under)
        assert set().union(*pieces) == set(under)
        for part in parts:
            check_relation(outer, part, seen)


@pytest.mark.parametrize("seed", range(4))
def test_relations_of_views_that_loaders_make_are_true_and_rarely_unknown(seed: int) -> None:
    rng = random.Random(seed)
    seen: Counter[str] = Counter()
    for _ in range(2500):
        shape = rng.choice(SHAPES)
        check_relation(loader_view(rng, shape), loader_view(rng, shape), seen)
    assert min(seen[word] for word in ("disjoint", "Inside", "Split")) > 100
    assert seen[UNKNOWN] < 0.25 * seen.total(), seen


@pytest.mark.parametrize("seed", range(3))
def test_relations_of_wild_views_are_true(seed: int) -> None:
    rng = random.Random(seed)
    seen: Counter[str] = Counter()
    for _ in range(4000):
        check_relation(wild_view(rng), wild_view(rng), seen)
    assert min(seen[word] for word in ("disjoint", "Inside", "Split")) > 100


def test_slices_and_their_shards_are_never_unknown() -> None:
    # What every sharded layer does: rows or columns written, any box of them asked for.
    for rows, cols in product([1, 4, 6], repeat=2):
        whole = contiguous((rows, cols), 2)
        boxes = [
            whole.narrow(0, r, n).narrow(1, c, m)
            for r in range(rows)
            for n in range(1, rows - r + 1)
            for c in range(0, cols, 2)
            for m in range(1, cols - c + 1, 2)
        ]
        for outer, inner in product(boxes[:: max(1, len(boxes) // 25)], boxes):
            assert relate(outer, inner) is not UNKNOWN


def test_views_of_other_item_sizes_are_only_told_apart_by_their_bytes() -> None:
    assert relate(View((4,), (1,), 0, 4), View((4,), (1,), 8, 2)) is DISJOINT
    assert relate(View((4,), (1,), 0, 4), View((4,), (1,), 7, 2)) is UNKNOWN


@pytest.mark.parametrize("seed", range(2))
def test_coalesced_runs_hold_exactly_the_views_elements(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(1500):
        view = loader_view(rng, rng.choice(SHAPES))
        held = Counter(e for start, n in view.runs() for e in range(start, start + n))
        assert set(held) == set(elements(view)), view
        dims, run = view.coalesced()
        assert run >= 1
        assert all(a[1] >= b[1] for a, b in zip(dims, dims[1:], strict=False))


@pytest.mark.parametrize("seed", range(2))
def test_spans_and_contiguity_are_what_the_elements_say(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(1500):
        view = rng.choice([loader_view(rng, rng.choice(SHAPES)), wild_view(rng)])
        at = elements(view)
        assert view.span() == (min(at) * 4, (max(at) + 1) * 4)
        if view.is_contiguous():
            assert at == list(range(view.offset, view.offset + view.numel))
        else:
            assert at != list(range(view.offset, view.offset + view.numel))


@pytest.mark.parametrize("seed", range(3))
def test_strips_move_each_element_to_its_place(seed: int) -> None:
    rng = random.Random(seed)
    moved = 0
    for _ in range(3000):
        source = loader_view(rng, rng.choice(SHAPES), 2)
        target = (
            contiguous(source.size, 2, rng.randrange(5))
            if rng.random() < 0.5
            else View(source.size, wild_strides(rng, source.size), rng.randrange(5), 2)
        )
        strips = pair(source, target)
        if strips is None:
            continue
        moved += 1
        got = {
            s.target + row * s.target_stride + i: s.source + row * s.source_stride + i
            for s in strips
            for row in range(s.rows)
            for i in range(s.row_bytes)
        }
        pairs = zip(elements(source), elements(target), strict=True)
        assert got == {t * 2 + i: s * 2 + i for s, t in pairs for i in range(2)}
    assert moved > 300


def wild_strides(rng: random.Random, size: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a target whose elements are all its own: dense, in some order, gaps allowed."""
    order = list(range(len(size)))
    if rng.random() < 0.5:
        rng.shuffle(order)
    stride = [0] * len(size)
    step = 1
    for d in reversed(order):
        stride[d] = step
        step *= size[d] + rng.choice([0, 0, 1])
    return tuple(stride)


@pytest.mark.parametrize("seed", range(3))
def test_dense_order_reads_each_element_once_and_shows_them_as_asked(seed: int) -> None:
    rng = random.Random(seed)
    found = 0
    for _ in range(3000):
        view = rng.choice([loader_view(rng, rng.choice(SHAPES)), wild_view(rng)])
        ordered = dense_order(view)
        if ordered is None:
            continue
        found += 1
        source, shown = ordered
        file_order = elements(source)
        assert len(set(file_order)) == len(file_order)
        assert file_order == sorted(file_order)
        assert [file_order[at] for at in elements(shown)] == elements(view)
    assert found > 1500
