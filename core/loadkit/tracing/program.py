"""From recorded values to expressions: what to read, and what to do with it.

``resolve`` follows a value back through the writes of its storage to the regions of leaves that it
is made of. A region asked of a pointwise operation is asked of its inputs instead; anything else
needs its inputs whole. Where writes overlap in a way that boxes cannot say, the storage is
replayed, write by write, in memory: slower, never wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from loadkit.tracing.blocks import DecodeBlocks, blocks_of
from loadkit.tracing.expressions import (
    Call,
    Const,
    Expr,
    Filled,
    Missing,
    Part,
    Pieces,
    Replay,
    Src,
    as_dtype,
    cast,
    exprs_in,
    reshaped,
)
from loadkit.tracing.layers import last_write
from loadkit.tracing.replay import holes
from loadkit.tracing.storage import (
    Constant,
    FileLeaf,
    Fill,
    GeneratedLeaf,
    Operation,
    Storage,
    Unwritten,
    Value,
    Write,
)
from loadkit.tracing.view import Inside, Split, View, contiguous, relate

__all__ = [
    "TooLongError",
    "children",
    "exactness",
    "limited_work",
    "replayed",
    "resolve",
    "resolve_region",
    "sources_of",
    "walk",
]


MAX_STEPS = 20_000  # values behind one parameter; a program of more is not one to read regions by


class _Work(threading.local):
    left: int | None = None


_work = _Work()


class TooLongError(Exception):
    """A value has more than ``MAX_STEPS`` values behind it."""


@contextmanager
def limited_work(writes: int) -> Iterator[None]:
    """Inside, resolving gives up after ``MAX_STEPS`` values, and a few for each of ``writes``.

    Raises:
        TooLongError: it did. A value used twice at each of many steps has a tree of that size.
    """
    outer, _work.left = _work.left, MAX_STEPS + 16 * writes
    try:
        yield
    finally:
        _work.left = outer


def resolve(value: Value) -> Expr:
    """The value as one expression of its view's size and its dtype.

    Raises:
        TooLongError: inside ``limited_work``.
    """
    if _work.left is not None:
        _work.left -= 1
        if _work.left < 0:
            raise TooLongError
    size = value.view.size
    if value.view.numel == 0:
        return Filled(0, size, value.dtype)
    out = contiguous(size, value.view.itemsize)
    parts = list(resolve_region(value.storage, value.version, value.view, out, value.dtype))
    if len(parts) == 1:
        expr = parts[0][1]
        return expr if expr.size == size else reshaped(expr, size)
    return Pieces(tuple(parts), size, value.dtype)


def resolve_region(
    storage: Storage, version: int, view: View, out: View, dtype: torch.dtype
) -> Iterator[tuple[View, Expr]]:
    """The region piece by piece: (where in ``out``, what); pieces do not overlap.

    ``out`` has ``view``'s size. A piece's expression has its out view's size.
    """
    work = [(view, out, len(storage.writes))]
    while work:
        region, place, depth = work.pop()
        hit = last_write(storage, version, depth, region) if version else None
        if hit is None:
            yield from _from_base(storage, region, place, dtype, work)
            continue
        write, relation, below = hit
        if isinstance(relation, Split) and write.mask is None:
            work.extend(_cut(relation, place, below))
        elif isinstance(relation, Inside) and write.mask is None:
            yield from _written(write, relation, _redimension(place, relation.size), dtype)
        else:
            yield place, Replay(storage, version, region, dtype)


def _cut(split: Split, place: View, depth: int) -> Iterator[tuple[View, View, int]]:
    """The pieces of a split, last first (the work list is a stack)."""
    place = _redimension(place, split.view.size)
    edges = (0, *split.cuts, split.view.size[split.dim])
    for a, b in reversed(list(zip(edges, edges[1:], strict=False))):
        yield (
            split.view.narrow(split.dim, a, b - a),
            place.narrow(split.dim, a, b - a),
            depth,
        )


def _written(
    write: Write, where: Inside, place: View, dtype: torch.dtype
) -> Iterator[tuple[View, Expr]]:
    """What a write put into a part of its view, read as ``dtype``, piece by piece."""
    value = write.value
    if isinstance(value, Fill):
        yield place, as_dtype(Filled(value.value, where.size, write.dtype), dtype)
        return
    sub = where.apply(value.view.expand(write.view.size))
    for at, expr in resolve_region(value.storage, value.version, sub, place, value.dtype):
        yield at, as_dtype(cast(expr, write.dtype), dtype)


def _from_base(
    storage: Storage,
    region: View,
    place: View,
    dtype: torch.dtype,
    work: list[tuple[View, View, int]],
) -> Iterator[tuple[View, Expr]]:
    base = storage.base
    if isinstance(base, (FileLeaf, GeneratedLeaf)):
        yield place, Src(base, region, dtype)
    elif isinstance(base, Constant):
        flat = base.flat if base.flat.dtype == dtype else base.flat.view(dtype)
        real = flat.as_strided(region.size, region.stride, region.offset)
        yield place, Const(real, base.source)
    elif isinstance(base, Fill) and base.dtype.itemsize != region.itemsize:
        yield place, Replay(storage, 0, region, dtype)
    elif isinstance(base, Fill):
        yield place, as_dtype(Filled(base.value, region.size, base.dtype), dtype)
    elif isinstance(base, Unwritten):
        yield place, Missing(base.what, region.size, dtype)
    else:
        yield from _from_operation(base, region, place, dtype, work)


def _from_operation(
    op: Operation,
    region: View,
    place: View,
    dtype: torch.dtype,
    work: list[tuple[View, View, int]],
) -> Iterator[tuple[View, Expr]]:
    if isinstance(op.func, DecodeBlocks):
        relation = relate(op.view, region)
        if isinstance(relation, Split):
            work.extend(_cut(relation, place, 0))
            return
        if isinstance(relation, Inside):
            yield _redimension(place, relation.size), as_dtype(_decoded(op, relation), dtype)
            return
    elif torch.Tag.pointwise in op.func.tags and op.output is None:
        relation = relate(op.view, region)
        if isinstance(relation, Split):
            work.extend(_cut(relation, place, 0))
            return
        if isinstance(relation, Inside):
            yield _redimension(place, relation.size), as_dtype(_pushed(op, relation), dtype)
            return
    call = Call(
        op.func,
        _whole(op.args),
        _whole(op.kwargs),
        op.output,
        op.view.size,
        op.dtype,
        pointwise=False,
        origin=op,
    )
    yield place, Part(call, region, dtype)


def _decoded(op: Operation, where: Inside) -> Expr:
    """A region of an encoded tensor: its blocks decoded, and the part of them that it is."""
    blocks = blocks_of(op, where)
    stored = op.args[0]
    source = resolve(Value(stored.storage, stored.version, blocks.source, stored.dtype))
    call = Call(op.func, (source,), {}, None, blocks.decoded, op.dtype, pointwise=False)
    if blocks.aligned:
        return call if blocks.decoded == where.size else reshaped(call, where.size)
    show = torch.ops.aten.as_strided.default
    view = blocks.shown
    args = (call, list(view.size), list(view.stride), view.offset)
    return Call(show, args, {}, None, view.size, op.dtype, pointwise=False)


def _pushed(op: Operation, where: Inside) -> Expr:
    """The part of a pointwise call that a region is: the same call on parts of its arguments."""
    args, kwargs = _push(op.args, op, where), _push(op.kwargs, op, where)
    if not op.view.size:  # all of its tensors are 0-d
        call = Call(op.func, args, kwargs, None, (), op.dtype, pointwise=True)
        return _expanded(call, where.size) if where.size else call
    call = Call(op.func, args, kwargs, None, where.size or (1,), op.dtype, pointwise=True)
    return call if where.size else reshaped(call, ())


def _expanded(expr: Expr, size: tuple[int, ...]) -> Expr:
    """A 0-d expression, everywhere."""
    expand = torch.ops.aten.expand.default
    return Call(expand, (expr, list(size)), {}, None, size, expr.dtype, pointwise=False)


def _push(tree: Any, op: Operation, where: Inside) -> Any:
    """Arguments of a pointwise call, cut to the region asked for."""
    if isinstance(tree, Value):
        if not tree.view.size:
            return resolve(tree)  # a 0-d tensor takes part in type promotion as a scalar
        sub = _at_least_1d(where.apply(tree.view.expand(op.view.size)))
        return resolve(Value(tree.storage, tree.version, sub, tree.dtype))
    if isinstance(tree, torch.Tensor):
        if not tree.dim():
            return tree
        wide = tree.expand(op.view.size)
        full = View(tuple(wide.size()), wide.stride(), int(wide.storage_offset()), wide.itemsize)
        sub = _at_least_1d(where.apply(full))
        return wide.as_strided(sub.size, sub.stride, sub.offset)
    if isinstance(tree, (tuple, list)):
        return type(tree)(_push(item, op, where) for item in tree)
    if isinstance(tree, dict):
        return {key: _push(item, op, where) for key, item in tree.items()}
    return tree


def _at_least_1d(view: View) -> View:
    return view if view.size else View((1,), (0,), view.offset, view.itemsize)


def _whole(tree: Any) -> Any:
    if isinstance(tree, Value):
        return resolve(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)(_whole(item) for item in tree)
    if isinstance(tree, dict):
        return {key: _whole(item) for key, item in tree.items()}
    return tree


def _redimension(view: View, size: tuple[int, ...]) -> View:
    """``view`` with dimensions split so that its size is ``size``."""
    if view.size == size:
        return view
    stride: list[int] = []
    at = 0
    for n, s in zip(view.size, view.stride, strict=True):
        group = [size[at]]
        at += 1
        while _product(group) != n:
            group.append(size[at])
            at += 1
        inner = _product(group)
        for part in group:
            inner //= part
            stride.append(s * inner)
    return View(size, tuple(stride), view.offset, view.itemsize)


def _product(numbers: list[int]) -> int:
    out = 1
    for n in numbers:
        out *= n
    return out


def children(expr: Expr) -> Iterator[Expr]:
    """The expressions directly below one."""
    if isinstance(expr, Call):
        yield from exprs_in((expr.args, expr.kwargs))
    elif isinstance(expr, Part):
        yield expr.call
    elif isinstance(expr, Pieces):
        yield from (part for _, part in expr.parts)
    elif isinstance(expr, Replay):
        yield from replayed(expr)
        count = holes(expr.storage, expr.version, expr.view)
        if count:
            yield Missing("a buffer", (count,), expr.dtype)


def replayed(expr: Replay) -> Iterator[Expr]:
    """What a replay copies into its storage."""
    for write in expr.storage.writes[: expr.version]:
        if isinstance(write.value, Value):
            yield resolve(write.value)
    yield from _replay_base(expr.storage)


def _replay_base(storage: Storage) -> Iterator[Expr]:
    base = storage.base
    if isinstance(base, (FileLeaf, GeneratedLeaf)):
        yield Src(base, contiguous(base.size, base.dtype.itemsize), base.dtype)
    elif isinstance(base, Operation):
        yield resolve(
            Value(Storage(base, storage.numel, storage.itemsize), 0, base.view, base.dtype)
        )
    elif isinstance(base, Constant):
        yield Const(base.flat, base.source)


def walk(expr: Expr) -> Iterator[Expr]:
    """The expression and everything below it."""
    stack = [expr]
    while stack:
        item = stack.pop()
        yield item
        stack.extend(children(item))


def sources_of(expr: Expr) -> Iterator[Src | Const]:
    """Every region of a leaf, and every real tensor, that it reads."""
    for item in walk(expr):
        if isinstance(item, (Src, Const)):
            yield item


def exactness(expr: Expr) -> str:
    """One word: exact, only the region is read; whole, more is; opaque, data came real."""
    word = "exact"
    for item in walk(expr):
        if isinstance(item, Const) and item.source is not None:
            return "opaque"
        if isinstance(item, Replay) or (isinstance(item, Part) and not _is_all(item)):
            word = "whole"
    return word


def _is_all(part: Part) -> bool:
    return part.view.numel * part.dtype.itemsize == (
        _product(list(part.call.size)) * part.call.dtype.itemsize
    )
