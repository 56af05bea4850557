"""Turns an expression into a real tensor; regions of leaves come from a ``fetch`` function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from loadkit.errors import TraceError
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
)
from loadkit.tracing.program import resolve
from loadkit.tracing.replay import holes
from loadkit.tracing.storage import (
    Constant,
    FileLeaf,
    Fill,
    GeneratedLeaf,
    Operation,
    Storage,
    Value,
)
from loadkit.tracing.view import View, contiguous

__all__ = ["Fetch", "ResultCache", "evaluate", "generate", "strided"]

Fetch = Callable[[Src], torch.Tensor]
ResultCache = dict[int, torch.Tensor]
"""Results of whole operations by id, so that several parts of one share the work."""


def strided(flat: torch.Tensor, view: View, dtype: torch.dtype) -> torch.Tensor:
    """``view`` of flat 1-d memory, its bits read as ``dtype``."""
    if flat.dtype != dtype:
        flat = (
            flat.view(torch.uint8).view(dtype)
            if flat.itemsize != dtype.itemsize
            else flat.view(dtype)
        )
    return flat.as_strided(view.size, view.stride, int(flat.storage_offset()) + view.offset)


def generate(leaf: GeneratedLeaf, src: Src) -> torch.Tensor:
    """A region of a leaf that a formula makes, its bits read as the region's dtype."""
    view, size = src.view, leaf.dtype.itemsize
    if view.itemsize == size:
        return leaf.make(view).view(src.dtype)
    low, high = view.span()
    first, last = low // size, -(-high // size)
    flat = leaf.make(View((last - first,), (1,), first, size)).contiguous().view(torch.uint8)
    data = flat[low - first * size : high - first * size].clone().view(src.dtype)
    return data.as_strided(view.size, view.stride, view.offset - low // view.itemsize)


def evaluate(expr: Expr, fetch: Fetch, cache: ResultCache | None = None) -> torch.Tensor:
    """The expression's value, of its size and dtype, on the CPU. It may alias leaves: do not write.

    Raises:
        TraceError: it reads elements that nothing wrote.
    """
    cache = {} if cache is None else cache
    if isinstance(expr, Src):
        return fetch(expr)
    if isinstance(expr, Const):
        return expr.tensor.to("cpu")  # a live model's may be elsewhere
    if isinstance(expr, Filled):
        return torch.full((), expr.value, dtype=expr.dtype).expand(expr.size)
    if isinstance(expr, Missing):
        raise TraceError(f"{expr.what} is read before anything was written to it")
    if isinstance(expr, Call):
        return _call(expr, fetch, cache)
    if isinstance(expr, Part):
        return _part(expr, fetch, cache)
    if isinstance(expr, Pieces):
        out = torch.empty(expr.size, dtype=expr.dtype)
        for view, part in expr.parts:
            out.as_strided(view.size, view.stride, view.offset).copy_(evaluate(part, fetch, cache))
        return out
    return _replay(expr, fetch, cache)


def _call(call: Call, fetch: Fetch, cache: ResultCache) -> torch.Tensor:
    args = _real(call.args, fetch, cache)
    kwargs = _real(call.kwargs, fetch, cache)
    out = _result(call, args, kwargs)
    if out.dtype != call.dtype and call.dtype.is_floating_point:
        # integers became floats of the default dtype, and loader code had another one
        default = torch.get_default_dtype()
        torch.set_default_dtype(call.dtype)
        try:
            out = _result(call, args, kwargs)
        finally:
            torch.set_default_dtype(default)
    if tuple(out.size()) != call.size or out.dtype != call.dtype:
        raise TraceError(
            f"{call.func} gave {list(out.size())} {out.dtype} when it was executed, and "
            f"{list(call.size)} {call.dtype} when it was recorded"
        )
    return out


def _result(call: Call, args: Any, kwargs: Any) -> torch.Tensor:
    result = call.func(*args, **kwargs)
    out = result if call.output is None else result[call.output]
    if not isinstance(out, torch.Tensor):
        raise TraceError(f"{call.func} gave no tensor")
    return out


def _real(tree: Any, fetch: Fetch, cache: ResultCache) -> Any:
    if isinstance(tree, (Src, Filled, Const, Call, Part, Pieces, Replay, Missing)):
        return evaluate(tree, fetch, cache)
    if isinstance(tree, (tuple, list)):
        return type(tree)(_real(item, fetch, cache) for item in tree)
    if isinstance(tree, dict):
        return {key: _real(item, fetch, cache) for key, item in tree.items()}
    return tree


def _part(part: Part, fetch: Fetch, cache: ResultCache) -> torch.Tensor:
    origin = part.call.origin
    if origin is None:
        raise TraceError(f"{part.call.func} has no recorded operation")
    flat = cache.get(id(origin))
    if flat is None:
        out = _call(part.call, fetch, cache)
        want = origin.view
        memory = torch.empty(_extent(want), dtype=out.dtype)
        memory.as_strided(want.size, want.stride, want.offset).copy_(out)
        flat = cache[id(origin)] = memory
    return strided(flat, part.view, part.dtype)


def _extent(view: View) -> int:
    return view.span()[1] // view.itemsize


def _replay(expr: Replay, fetch: Fetch, cache: ResultCache) -> torch.Tensor:
    storage = expr.storage
    if holes(storage, expr.version, expr.view):
        raise TraceError("a buffer made while loading is read where nothing was written to it")
    flat = torch.empty(storage.numel * storage.itemsize, dtype=torch.uint8)
    _replay_base(storage, flat, fetch, cache)
    for write in storage.writes[: expr.version]:
        if write.view.numel == 0:
            continue
        target = strided(flat, write.view, write.dtype)
        value = (
            torch.full((), write.value.value, dtype=write.dtype)
            if isinstance(write.value, Fill)
            else evaluate(resolve(write.value), fetch, cache)
        ).expand(write.view.size)
        if write.mask is None:
            target.copy_(value)
        else:
            mask = write.mask.view(write.view.size)
            target.copy_(torch.where(mask, value.to(write.dtype), target))
    return strided(flat, expr.view, expr.dtype)


def _replay_base(storage: Storage, flat: torch.Tensor, fetch: Fetch, cache: ResultCache) -> None:
    base = storage.base
    if isinstance(base, Constant):
        flat.view(base.flat.dtype).copy_(base.flat)
    elif isinstance(base, Fill):
        flat.view(base.dtype).fill_(base.value)
    elif isinstance(base, (FileLeaf, GeneratedLeaf)):
        whole = Src(base, contiguous(base.size, base.dtype.itemsize), base.dtype)
        flat.view(base.dtype).copy_(evaluate(whole, fetch, cache).reshape(-1))
    elif isinstance(base, Operation):
        fresh = Storage(base, storage.numel, storage.itemsize)
        value = evaluate(resolve(Value(fresh, 0, base.view, base.dtype)), fetch, cache)
        strided(flat, base.view, base.dtype).copy_(value)
