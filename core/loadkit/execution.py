"""How a plan's targets are moved: shared by the plan, which counts it, and by the read step.

A target is one parameter (or buffer). Its pieces are moved in one of five ways: *strips* of a file
straight into its memory, *alias* (its memory is the file's mapping), *pages* (pages of its memory
are those of files), *fill*, or *compute* (cast, arithmetic, transposes: in bounded chunks).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from loadkit.page_runs import Pages, pages_of
from loadkit.readers.base import Place
from loadkit.sources.base import File
from loadkit.tracing.coverage import is_kept
from loadkit.tracing.expressions import (
    Call,
    Const,
    Expr,
    Filled,
    Part,
    Src,
)
from loadkit.tracing.pairing import Strip, dense_order, pair
from loadkit.tracing.program import walk
from loadkit.tracing.storage import FileLeaf, Storage
from loadkit.tracing.view import View

__all__ = ["CHUNK", "Moves", "Target", "chunks", "fetch_strips", "files_of", "moves_of", "place_at"]

NO_PAGES = Pages(0, ())
CHUNK = 8 << 20  # bytes of a target that are computed at once
FEW_STRIPS = 16
SMALL_STRIP = 16 << 10  # bytes; a strip costs about as much as copying these


@dataclass(eq=False)
class Target:
    """One parameter or buffer to fill, under all of its names.

    ``view`` is its place in ``storage``, ``pieces`` what each region of it is to hold, ``checks``
    regions whose contents a second tensor must equal (tied weights), with that tensor's name.
    """

    names: tuple[str, ...]
    storage: Storage
    view: View
    dtype: torch.dtype
    is_parameter: bool
    pieces: list[tuple[View, Expr]]
    checks: list[tuple[View, Expr, str]] = field(default_factory=list)
    may_alias: bool = True
    may_overlay: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.view.numel * self.dtype.itemsize


class Moves(NamedTuple):
    """How a target is filled. ``alias`` is (file, offset, bytes) if it is a view of the file."""

    alias: tuple[FileLeaf, int, int] | None
    strips: list[tuple[FileLeaf, Strip]]
    fills: list[tuple[View, Any]]
    computed: list[tuple[View, Expr]]
    pages: Pages = NO_PAGES


def moves_of(target: Target, *, alias: bool) -> Moves:
    """Sort a target's pieces by how they are moved.

    Args:
        target: what is to be filled.
        alias: its memory may be the file's mapping, or have pages of it.
    """
    strips: list[tuple[FileLeaf, Strip]] = []
    fills: list[tuple[View, Any]] = []
    computed: list[tuple[View, Expr]] = []
    live = target.storage.real is not None
    for view, expr in target.pieces:
        if live and is_kept(target.storage, expr):
            continue
        if isinstance(expr, Filled):
            fills.append((view, expr.value))
            continue
        found = None
        if isinstance(expr, Src) and isinstance(expr.leaf, FileLeaf):
            found = pair(expr.view, view)
            if found is not None and _is_crumbs(found):
                found = None
            if found is not None:
                strips += [(expr.leaf, strip) for strip in found]
        if found is None:
            computed.append((view, expr))
    place = None
    if alias and target.may_alias and not fills and not computed:
        place = _one_run(target, strips)
    if place is not None:
        return Moves(place, [], fills, computed)
    pages = NO_PAGES
    if alias and target.may_alias and target.may_overlay:
        pages, strips = pages_of(strips, target.dtype.itemsize)
    return Moves(None, strips, fills, computed, pages)


def _is_crumbs(strips: list[Strip]) -> bool:
    """Whether one strided copy in memory is cheaper than so many small strips."""
    if len(strips) <= FEW_STRIPS:
        return False
    return sum(strip.rows * strip.row_bytes for strip in strips) < len(strips) * SMALL_STRIP


def _one_run(
    target: Target, strips: list[tuple[FileLeaf, Strip]]
) -> tuple[FileLeaf, int, int] | None:
    """The one run of a file that is the whole target, in order, or None."""
    whole = target.view.offset == 0 and target.view.numel == target.storage.numel
    if not strips or not whole or not target.view.is_contiguous():
        return None
    if len(strips) > 1:
        strips = sorted(strips, key=lambda item: item[1].target)
    at = target.view.offset * target.dtype.itemsize
    leaf, first = strips[0]
    start = place = leaf.info.offset + first.source
    for item, strip in strips:
        if strip.rows != 1 and not strip.row_bytes == strip.source_stride == strip.target_stride:
            return None
        nbytes = strip.rows * strip.row_bytes
        if item.info.file is not leaf.info.file:
            return None
        if strip.target != at or item.info.offset + strip.source != place:
            return None
        at += nbytes
        place += nbytes
    if place - start != target.nbytes or start % target.dtype.itemsize:
        return None
    return leaf, start, target.nbytes


def chunks(view: View, expr: Expr) -> Iterator[tuple[View, Expr]]:
    """A computed piece in parts of about ``CHUNK`` bytes of target, where it can be cut."""
    nbytes = view.numel * view.itemsize
    dim = next((d for d, n in enumerate(view.size) if n > 1), None)
    if nbytes <= CHUNK or dim is None or not _can_narrow(expr):
        yield view, expr
        return
    length = max(1, view.size[dim] * CHUNK // nbytes)
    for start in range(0, view.size[dim], length):
        count = min(length, view.size[dim] - start)
        part = view.narrow(dim, start, count), narrow(expr, dim, start, count)
        if length == 1:
            yield from chunks(*part)
        else:
            yield part


def _can_narrow(expr: Expr) -> bool:
    if isinstance(expr, (Src, Filled, Const, Part)):
        return True
    return (
        isinstance(expr, Call)
        and expr.pointwise
        and all(_can_narrow(item) and item.size in ((), expr.size) for item in _arguments(expr))
        and not any(isinstance(a, (tuple, list)) for a in expr.args)
    )


def _arguments(call: Call) -> Iterator[Expr]:
    for item in (*call.args, *call.kwargs.values()):
        if isinstance(item, torch.Tensor):
            yield Const(item, None)
        elif isinstance(item, (Src, Filled, Const, Call, Part)) or hasattr(item, "parts"):
            yield item


def narrow(expr: Expr, dim: int, start: int, length: int) -> Expr:
    """The part ``[start, start + length)`` of dimension ``dim`` of what ``_can_narrow`` allows."""
    if isinstance(expr, Src):
        return Src(expr.leaf, expr.view.narrow(dim, start, length), expr.dtype)
    if isinstance(expr, Const):
        return Const(expr.tensor.narrow(dim, start, length), expr.source)
    if isinstance(expr, Part):
        return Part(expr.call, expr.view.narrow(dim, start, length), expr.dtype)
    size = (*expr.size[:dim], length, *expr.size[dim + 1 :])
    if isinstance(expr, Filled):
        return Filled(expr.value, size, expr.dtype)
    if not isinstance(expr, Call):
        raise TypeError(f"{type(expr).__name__} cannot be cut")

    def cut(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return item.narrow(dim, start, length) if item.dim() else item
        if isinstance(item, (Src, Filled, Const, Call, Part)):
            return narrow(item, dim, start, length) if item.size else item
        return item

    return Call(
        expr.func,
        tuple(cut(item) for item in expr.args),
        {key: cut(item) for key, item in expr.kwargs.items()},
        expr.output,
        size,
        expr.dtype,
        pointwise=True,
    )


def fetch_strips(view: View) -> tuple[list[Strip], View]:
    """How a region of a leaf is read into fresh dense memory: strips, and the view of it."""
    ordered = dense_order(view)
    if ordered is not None:
        source, shown = ordered
        dense = View(source.size, _row_major(source.size), 0, source.itemsize)
        strips = pair(source, dense)
        if strips is not None:
            return strips, shown
    low, high = view.span()
    hull = Strip(low, 0, high - low, 1, high - low, high - low)
    return [hull], View(view.size, view.stride, view.offset - low // view.itemsize, view.itemsize)


def _row_major(size: tuple[int, ...]) -> tuple[int, ...]:
    stride: list[int] = []
    step = 1
    for n in reversed(size):
        stride.append(step)
        step *= n
    return tuple(reversed(stride))


def place_at(leaf: FileLeaf, strip: Strip) -> Place:
    """Where a strip of a leaf lies in its file."""
    info = leaf.info
    offset = info.offset + strip.source
    return Place(info.file, offset, strip.row_bytes, strip.rows, strip.source_stride, leaf.name)


def files_of(targets: list[Target]) -> list[File]:
    """The files that the targets read, each once, by name."""
    found: dict[int, File] = {}
    for target in targets:
        exprs = [expr for _, expr in target.pieces] + [expr for _, expr, _ in target.checks]
        for expr in exprs:
            for item in (expr,) if isinstance(expr, Src) else walk(expr):
                if isinstance(item, Src) and isinstance(item.leaf, FileLeaf):
                    found[id(item.leaf.info.file)] = item.leaf.info.file
    return sorted(found.values(), key=lambda file: file.name)
