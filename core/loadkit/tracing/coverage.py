"""What a parameter holds in the end, and which of its elements were written never, or twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter

import torch

from loadkit.errors import TraceError
from loadkit.tracing.expressions import (
    Const,
    Expr,
    Filled,
    Missing,
    Replay,
    Src,
    cast,
)
from loadkit.tracing.lazy_tensor import leaf_names
from loadkit.tracing.program import (
    TooLongError,
    limited_work,
    replayed,
    resolve_region,
    walk,
)
from loadkit.tracing.replay import bytes_under, holes
from loadkit.tracing.storage import (
    PARAMETER,
    FileLeaf,
    Fill,
    GeneratedLeaf,
    Operation,
    Storage,
    Unwritten,
    Value,
    Write,
)
from loadkit.tracing.view import DISJOINT, UNKNOWN, Split, View, relate

__all__ = ["Overlap", "final_pieces", "is_kept", "overlaps"]

Piece = tuple[View, Expr]

_SMALL = 1 << 24  # bytes of memory that are looked at one by one, where strides do not tell


def final_pieces(storage: Storage, view: View, dtype: torch.dtype) -> list[Piece]:
    """What ``view`` holds after all writes: (region of the storage, expression), no overlaps.

    Regions that nothing wrote come as ``Missing``, or as ``Const`` over the storage's own memory
    where it has real memory (see ``is_kept``).

    Raises:
        TraceError: the program behind it is too long to read regions by; names its tensors.
    """
    plain = _plain_copies(storage, view, dtype)
    if plain is not None:
        return plain
    try:
        with limited_work(len(storage.writes)):
            return _pieces(storage, view, dtype)
    except (TooLongError, RecursionError):
        names = sorted(leaf_names(Value(storage, len(storage.writes), view, dtype)))
        raise TraceError(
            "a parameter is the end of too long a chain of operations",
            tensor=names[0] if names else None,
            detail={"tensors": names},
        ) from None


def _plain_copies(storage: Storage, view: View, dtype: torch.dtype) -> list[Piece] | None:
    """The pieces where all that was written is regions of files, and they fill the view exactly.

    That is nearly every parameter; anything else is None, and ``resolve_region`` looks closely.
    """
    data = storage.writes[storage.loaded_from :] if storage.loaded_from else storage.writes
    pieces: list[tuple[int, View, Expr]] = []
    for write in data:
        value, at = write.value, write.view
        if isinstance(value, Fill) or write.mask is not None or write.dtype != dtype:
            return None
        source = value.storage
        if source.writes or not isinstance(source.base, FileLeaf) or value.view.size != at.size:
            return None
        expr = cast(Src(source.base, value.view, value.dtype), dtype)
        pieces.append((at.offset, at, expr))
    if len(pieces) == 1:
        return [pieces[0][1:]] if pieces[0][1] == view else None
    if not view.is_contiguous():
        return None
    pieces.sort(key=itemgetter(0))
    end = view.offset
    for start, at, _ in pieces:
        if start != end or at.itemsize != view.itemsize or not at.is_contiguous():
            return None
        end += at.numel
    if end != view.offset + view.numel or not pieces:
        return None
    return [piece[1:] for piece in pieces]


def _pieces(storage: Storage, view: View, dtype: torch.dtype) -> list[Piece]:
    if view.numel == 0:
        return []
    rows = _sorted_runs(storage, view)
    if rows is None:
        loaded = _loaded(storage)
        return list(resolve_region(loaded, len(loaded.writes), view, view, dtype))
    pieces: list[Piece] = []
    at = view.offset
    for start, end, write in rows:
        if start > at:
            pieces += resolve_region(
                storage, 0, _run(at, start, view), _run(at, start, view), dtype
            )
        lone = Storage(storage.base, storage.numel, storage.itemsize, [write])
        pieces += resolve_region(lone, 1, write.view, write.view, dtype)
        at = end
    end = view.offset + view.numel
    if at < end:
        pieces += resolve_region(storage, 0, _run(at, end, view), _run(at, end, view), dtype)
    return pieces


def _loaded(storage: Storage) -> Storage:
    """The storage as if its constructor had written nothing. Values still see what it wrote."""
    if not storage.loaded_from:
        return storage
    data = storage.writes[storage.loaded_from :]
    return Storage(
        storage.base, storage.numel, storage.itemsize, data, keep=storage.keep, real=storage.real
    )


def _run(start: int, end: int, like: View) -> View:
    return View((end - start,), (1,), start, like.itemsize)


def _sorted_runs(storage: Storage, view: View) -> list[tuple[int, int, Write]] | None:
    """The writes as (start, end, write) by place, if all are runs inside the view, apart."""
    data = storage.writes[storage.loaded_from :]
    if not view.is_contiguous() or len(data) < 2:
        return None
    end = view.offset + view.numel
    rows: list[tuple[int, int, Write]] = []
    for write in data:
        w = write.view
        if w.numel == 0:
            continue
        if write.mask is not None or w.itemsize != view.itemsize or not w.is_contiguous():
            return None
        if isinstance(write.value, Value) and write.value.storage is storage:
            return None
        rows.append((w.offset, w.offset + w.numel, write))
    rows.sort(key=lambda row: row[0])
    if any(a[1] > b[0] for a, b in pairwise(rows)):
        return None
    if rows and (rows[0][0] < view.offset or rows[-1][1] > end):
        return None
    if any(_reads(row[2], storage) for row in rows):
        return None
    return rows


@dataclass(frozen=True, slots=True)
class Overlap:
    """Checkpoint data written over other checkpoint data."""

    first: Write
    second: Write


def overlaps(storage: Storage) -> Iterator[Overlap]:
    """Pairs of writes of different checkpoint tensors that share elements.

    A write that reads the storage (a loader that transforms what it wrote, ``+=``) is no overlap,
    nor is data over a fill or a tensor over itself.
    """
    data = [
        (w, w.value)
        for w in storage.writes[storage.loaded_from :]
        if isinstance(w.value, Value) and w.view.numel
    ]
    near = _near([w.view.span() for w, _ in data]) if len(data) > 1 else []
    names = [leaf_names(value) for _, value in data] if near else []
    for i, j in near:
        first, second = data[i][0], data[j][0]
        if not names[i] or not names[j] or names[i] == names[j]:
            continue
        if _touch(first, second) and not _reads(second, storage):
            yield Overlap(first, second)


def _near(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Pairs (earlier, later) of spans that share bytes, in order of the later one."""
    open_now: list[tuple[int, int]] = []
    pairs: list[tuple[int, int]] = []
    for start, end, at in sorted((*span, i) for i, span in enumerate(spans)):
        open_now = [item for item in open_now if item[0] > start]
        pairs += [(min(at, other), max(at, other)) for _, other in open_now]
        open_now.append((end, at))
    return sorted(pairs, key=lambda pair: (pair[1], pair[0]))


def _touch(a: Write, b: Write) -> bool:
    if a.mask is not None and b.mask is not None and a.view == b.view:
        return bool((a.mask & b.mask).any())
    return _views_touch(a.view, b.view)


def _views_touch(a: View, b: View) -> bool:
    relation = relate(a, b)
    if isinstance(relation, Split):
        return any(_views_touch(a, part) for part in relation.parts())
    if relation is not UNKNOWN or max(a.span()[1], b.span()[1]) > _SMALL:
        return relation is not DISJOINT
    marks = torch.zeros(max(a.span()[1], b.span()[1]), dtype=torch.bool)
    bytes_under(marks, a).fill_(True)
    return bool(bytes_under(marks, b).any())


def _reads(write: Write, storage: Storage) -> bool:
    """Whether what it wrote was made from the same storage."""
    if isinstance(write.value, Fill):
        return False
    seen: set[int] = set()
    stack: list[Storage] = [write.value.storage]
    while stack:
        item = stack.pop()
        if item is storage:
            return True
        if id(item) in seen or (
            isinstance(item.base, (FileLeaf, GeneratedLeaf)) and not item.writes
        ):
            continue
        seen.add(id(item))
        if isinstance(item.base, Operation):
            stack.extend(value.storage for value in item.base.inputs())
        stack.extend(w.value.storage for w in item.writes if isinstance(w.value, Value))
    return False


def is_kept(storage: Storage, expr: Expr) -> bool:
    """Whether a piece is just the storage's own real memory, as it was."""
    return (
        storage.real is not None
        and isinstance(expr, Const)
        and expr.tensor.untyped_storage()._cdata == storage.real.untyped_storage()._cdata
    )


def reads_own_memory(storage: Storage, expr: Expr) -> bool:
    """Whether an expression depends on what the storage's real memory holds."""
    return any(is_kept(storage, item) for item in walk(expr))


def missing_in(view: View, expr: Expr, *, untouched: bool = False) -> int:
    """How many elements of a piece nothing wrote."""
    if untouched or (isinstance(expr, Missing) and expr.what == PARAMETER):
        return view.numel
    return holes(expr.storage, expr.version, expr.view) if isinstance(expr, Replay) else 0


def unwritten(pieces: list[Piece]) -> int:
    """How many elements of the pieces are made from elements that nothing wrote."""
    return sum(view.numel for view, expr in pieces if _reads_nothing(expr))


def _reads_nothing(expr: Expr) -> bool:
    if isinstance(expr, (Filled, Src)):
        return False
    if isinstance(expr, Missing):
        return expr.what != PARAMETER  # a copy of a buffer's elements that nothing wrote
    if isinstance(expr, Replay):
        return any(isinstance(item, Missing) for part in replayed(expr) for item in walk(part))
    return any(isinstance(item, Missing) for item in walk(expr))


def on_top_of(expr: Replay, start: Storage) -> Replay:
    """A replay over what a storage held first; zeros where that is nothing either."""
    base = Fill(0, expr.dtype) if isinstance(start.base, Unwritten) else start.base
    writes = [*start.writes, *expr.storage.writes[: expr.version]]
    whole = Storage(base, start.numel, start.itemsize, writes)
    return Replay(whole, len(writes), expr.view, expr.dtype)


def moved_home(
    view: View, dtype: torch.dtype, pieces: list[Piece]
) -> tuple[Storage, View, list[Piece]]:
    """The pieces of a view in a storage of its own, that is no larger than it need be."""
    first = view.offset
    low, high = view.span()
    storage = Storage(Unwritten(PARAMETER), (high - low) // view.itemsize, view.itemsize)
    moved = [(at._replace(offset=at.offset - first), expr) for at, expr in pieces]
    return storage, view._replace(offset=0), moved
