"""Calls that give a view: arithmetic on strides, by hand where it is frequent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loadkit.tracing.lazies import meta_like, view_of
from loadkit.tracing.lazy_tensor import LazyTensor
from loadkit.tracing.schema import aten, map_tensors, tensors_in
from loadkit.tracing.view import View

__all__ = ["view_call"]


def view_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call that gives a view of its first argument; NotImplemented where it made a copy.

    ``reshape``, ``contiguous`` and ``to`` may do either. They come as such in inference mode only,
    else as what they are made of.
    """
    base = args[0]
    if not isinstance(base, LazyTensor):
        return func(*args, **kwargs)
    quick = _QUICK_VIEWS.get(func)
    if quick is not None:
        return LazyTensor(base.lazy_storage, quick(base.lazy_view, *args[1:], **kwargs), base.dtype)
    shadow = meta_like(base)
    result = func(shadow, *args[1:], **kwargs)
    own = shadow.untyped_storage()._cdata
    if any(found.untyped_storage()._cdata != own for found in tensors_in(result)):
        return NotImplemented
    return map_tensors(result, lambda m: LazyTensor(base.lazy_storage, view_of(m), m.dtype))


def _q_slice(
    v: View, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> View:
    dim %= len(v.size)
    first, last, step = slice(start, end, step).indices(v.size[dim])
    length = max(0, -(-(last - first) // step))
    out = v.narrow(dim, first if length else 0, length)
    stride = (*out.stride[:dim], out.stride[dim] * step, *out.stride[dim + 1 :])
    return View(out.size, stride, out.offset, v.itemsize)


def _q_select(v: View, dim: int, index: int) -> View:
    dim %= len(v.size)
    if not -v.size[dim] <= index < v.size[dim]:
        raise IndexError(f"index {index} is out of range for dimension {dim} of {list(v.size)}")
    index %= v.size[dim]
    return View(
        v.size[:dim] + v.size[dim + 1 :],
        v.stride[:dim] + v.stride[dim + 1 :],
        v.offset + index * v.stride[dim],
        v.itemsize,
    )


def _q_permute(v: View, dims: list[int]) -> View:
    order = [d % len(v.size) for d in dims]
    if sorted(order) != list(range(len(v.size))):
        raise RuntimeError(f"permute: {dims} does not name the dimensions of {list(v.size)}")
    return View(
        tuple(v.size[d] for d in order), tuple(v.stride[d] for d in order), v.offset, v.itemsize
    )


def _q_transpose(v: View, a: int, b: int) -> View:
    order = list(range(len(v.size)))
    if order:
        order[a], order[b] = order[b], order[a]
    return _q_permute(v, order)


def _q_t(v: View) -> View:
    return _q_transpose(v, 0, 1) if len(v.size) == 2 else v


def _q_same(v: View) -> View:
    return v


_QUICK_VIEWS: dict[Any, Callable[..., View]] = {
    aten.slice.Tensor: _q_slice,
    aten.select.int: _q_select,
    aten.permute.default: _q_permute,
    aten.transpose.int: _q_transpose,
    aten.t.default: _q_t,
    aten.detach.default: _q_same,
    aten.alias.default: _q_same,
    aten.lift_fresh.default: _q_same,
}
