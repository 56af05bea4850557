"""The rows of a plan: which elements of which tensor land where in a target."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from loadkit.execution import Target
from loadkit.load_plan import Region, Row
from loadkit.tracing.blocks import DecodeBlocks
from loadkit.tracing.expressions import Call, Const, Expr, Filled, Src
from loadkit.tracing.program import exactness, walk
from loadkit.tracing.storage import FileLeaf
from loadkit.tracing.view import View

__all__ = ["rows_of"]


def rows_of(target: Target, row_kind: str | None = None) -> list[Row]:
    """Every region of a target, and every tensor that is compared with it (tied weights).

    ``row_kind`` is what the parameter says that a copy into it is ("expert").
    """
    name = target.names[0]
    rows: list[Row] = []
    copy = row_kind or ("fused" if _is_fused(target) else "copy")
    for view, expr in target.pieces:
        region = _within(target, view)
        if isinstance(expr, Filled):
            rows.append(Row(None, None, None, name, region, "exact", "fill"))
        kind = _kind(expr)
        rows += _rows(expr, name, region, copy if kind == "copy" else kind)
    for view, expr, _ in target.checks:
        rows += _rows(expr, name, _within(target, view), "tied", "tied:verify")
    return rows


def _is_fused(target: Target) -> bool:
    """Whether more than one checkpoint tensor is in it."""
    first: str | None = None
    for _, expr in target.pieces:
        names = (expr.leaf.name,) if isinstance(expr, Src) else (leaf[0] for leaf in _leaves(expr))
        for tensor in names:
            if first is not None and tensor != first:
                return True
            first = tensor
    return False


def _within(target: Target, view: View) -> Region:
    return Region(view.offset - target.view.offset, view.size, view.stride)


def _rows(
    expr: Expr, parameter: str, region: Region, kind: str, reason: str | None = None
) -> list[Row]:
    """A row for everything an expression is made of, each region once."""
    if isinstance(expr, Src):
        return [Row(*_leaf(expr), parameter, region, "exact", kind, reason)]
    found = dict.fromkeys(_leaves(expr))
    word = exactness(expr) if found else "exact"
    return [
        Row(tensor, file, source, parameter, region, word, kind, reason)
        for tensor, file, source in found
    ]


def _leaf(src: Src) -> tuple[str, str | None, Region]:
    """(tensor, file, region) of a region of a leaf."""
    file = src.leaf.info.file.name if isinstance(src.leaf, FileLeaf) else None
    return src.leaf.name, file, Region(src.view.offset, src.view.size, src.view.stride)


def _leaves(expr: Expr) -> Iterator[tuple[str, str | None, Region | None]]:
    """(tensor, file, region) of everything an expression is made of."""
    for item in walk(expr):
        if isinstance(item, Src):
            yield _leaf(item)
        elif isinstance(item, Const) and item.source is not None:
            yield item.source, None, None


def _kind(expr: Expr) -> str:
    if isinstance(expr, Src):
        return "copy"
    if isinstance(expr, Call) and expr.func is torch.ops.aten._to_copy.default:
        inner = expr.args[0]
        return "cast" if isinstance(inner, Src) else _kind(inner) if _decodes(inner) else "compute"
    if _decodes(expr):
        return "decode"
    return "copy" if isinstance(expr, Const) else "compute"


def _decodes(expr: Expr) -> bool:
    return isinstance(expr, Call) and isinstance(expr.func, DecodeBlocks)
