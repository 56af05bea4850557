"""Calls that are nothing but writes to fresh memory: copies, casts, joins, pads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from loadkit.tracing.index_calls import index_call, index_select
from loadkit.tracing.lazies import as_lazy, scratch, to_meta, view_of
from loadkit.tracing.lazy_tensor import LazyTensor
from loadkit.tracing.schema import aten
from loadkit.tracing.storage import Fill, Storage, Unwritten
from loadkit.tracing.view import View
from loadkit.tracing.writes import record_copy

if TYPE_CHECKING:
    from loadkit.tracing.recorder import Recorder

__all__ = ["LOWERED"]


def _copied(
    recorder: Recorder | None, source: torch.Tensor, dtype: torch.dtype | None, view: View
) -> LazyTensor:
    dtype = dtype or source.dtype
    view = View(view.size, view.stride, 0, dtype.itemsize)
    storage = Storage(
        Unwritten("a copy"), view.span()[1] // dtype.itemsize, dtype.itemsize, scratch=True
    )
    out = LazyTensor(storage, view, dtype)
    record_copy(out, source, recorder)
    return out


def _clone(recorder: Recorder | None, source: torch.Tensor, *, memory_format: Any = None) -> Any:
    shadow = aten.clone.default(to_meta(source), memory_format=memory_format)
    return _copied(recorder, source, None, view_of(shadow))


def _to_copy(
    recorder: Recorder | None,
    source: torch.Tensor,
    *,
    dtype: Any = None,
    memory_format: Any = None,
    **_: Any,
) -> Any:
    shadow = aten.clone.default(to_meta(source), memory_format=memory_format)
    return _copied(recorder, source, dtype, view_of(shadow))


def _cat(recorder: Recorder | None, tensors: list[torch.Tensor], dim: int = 0) -> Any:
    tensors = [t for t in tensors if tuple(t.size()) != (0,)]
    if not tensors:
        return NotImplemented
    shadow = aten.cat.default([to_meta(t) for t in tensors], dim)
    out = scratch(tuple(shadow.size()), shadow.dtype, Unwritten("a concatenation"))
    at = 0
    for tensor in tensors:
        record_copy(out.narrow(dim, at, tensor.size(dim)), tensor, recorder)
        at += tensor.size(dim)
    return out


def _stack(recorder: Recorder | None, tensors: list[torch.Tensor], dim: int = 0) -> Any:
    shadow = aten.stack.default([to_meta(t) for t in tensors], dim)
    out = scratch(tuple(shadow.size()), shadow.dtype, Unwritten("a stack"))
    for i, tensor in enumerate(tensors):
        record_copy(out.select(dim, i), tensor, recorder)
    return out


def _repeat(recorder: Recorder | None, source: torch.Tensor, repeats: list[int]) -> Any:
    if any(n <= 0 for n in repeats):
        return NotImplemented
    size = (1,) * (len(repeats) - source.dim()) + tuple(source.size())
    whole = tuple(r * n for r, n in zip(repeats, size, strict=True))
    out = scratch(whole, source.dtype, Unwritten("a repetition"))
    apart = tuple(x for pair in zip(repeats, size, strict=True) for x in pair)
    shape = tuple(x for n in size for x in (1, n))
    record_copy(out.view(apart), as_lazy(source, recorder).reshape(shape), recorder)
    return out


def _pad(recorder: Recorder | None, source: torch.Tensor, pad: list[int], value: Any = 0) -> Any:
    if any(p < 0 for p in pad):
        return NotImplemented
    size = list(source.size())
    inner: list[tuple[int, int]] = []
    for k in range(len(pad) // 2):
        dim = len(size) - 1 - k
        inner.append((dim, pad[2 * k]))
        size[dim] += pad[2 * k] + pad[2 * k + 1]
    out = scratch(tuple(size), source.dtype, Fill(value, source.dtype))
    middle: torch.Tensor = out
    for dim, before in inner:
        middle = middle.narrow(dim, before, source.size(dim))
    record_copy(middle, source, recorder)
    return out


LOWERED: dict[Any, Callable[..., Any]] = {
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.index.Tensor: index_call,
    aten.index_select.default: index_select,
    aten.constant_pad_nd.default: _pad,
    aten.repeat.default: _repeat,
}
