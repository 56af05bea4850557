"""What each aten call means on lazy tensors: a view, a write, or a deferred operation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from loadkit.tracing import lazy_tensor
from loadkit.tracing.deferred import defer
from loadkit.tracing.index_calls import INDEX_WRITES
from loadkit.tracing.lazies import as_lazy, interesting, realise, untraceable
from loadkit.tracing.lazy_tensor import LazyTensor
from loadkit.tracing.lowered import LOWERED
from loadkit.tracing.mutation import mutate
from loadkit.tracing.schema import OpKind, aten, functional, kind_of, map_all, tensors_in
from loadkit.tracing.storage import Fill
from loadkit.tracing.view_calls import view_call
from loadkit.tracing.writes import note_foreign_write, record, record_copy

if TYPE_CHECKING:
    from loadkit.tracing.recorder import Recorder

__all__ = ["call", "odd_write"]


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Execute an aten call in which lazy tensors (or recorded memory) take part."""
    from loadkit.tracing.recorder import active_recorder

    recorder = active_recorder()
    kind = kind_of(func)
    if kind.view:
        result = view_call(func, args, kwargs)
        return defer(func, args, kwargs, recorder) if result is NotImplemented else result
    if kind.writes:
        return _write(func, args, kwargs, recorder, kind)
    lower = LOWERED.get(func)
    if lower is not None:
        result = lower(recorder, *args, **kwargs)
        if result is not NotImplemented:
            return result
    return defer(func, args, kwargs, recorder)


def _write(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    recorder: Recorder | None,
    kind: OpKind,
) -> Any:
    if kind.odd:
        return odd_write(func, args, kwargs, recorder)
    target = args[0]
    if not isinstance(target, LazyTensor) and recorder is None:
        if target.device.type == "meta":
            note_foreign_write()
            raise untraceable(func, (args, kwargs), "no plan is being recorded in this thread")
        real = _map_lazy((args, kwargs), lambda t: realise(t, recorder))
        return func(*real[0], **real[1])
    if func is aten.copy_.default:
        record_copy(target, args[1], recorder)
    elif func in (aten.fill_.Scalar, aten.zero_.default):
        number = args[1] if func is aten.fill_.Scalar else 0
        record(target, Fill(number, target.dtype), recorder)
    elif func is aten.fill_.Tensor:
        record_copy(target, args[1], recorder)
    else:
        index_write = INDEX_WRITES.get(func)
        if index_write is None or not index_write(recorder, *args, **kwargs):
            plain = functional(func)
            if plain is None:
                return mutate(func, args, kwargs, recorder, target)
            result = call(plain, (as_lazy(target, recorder), *args[1:]), kwargs)
            record_copy(target, result, recorder)
    return target


def odd_write(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], recorder: Recorder | None
) -> Any:
    """A write that is not simply one to the first argument.

    Raises:
        TraceError: it cannot be recorded.
    """
    names = [arg.name for arg in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    written = list(tensors_in([given[names[i]] for i in kind_of(func).writes if names[i] in given]))
    if torch.Tag.inplace_view in func.tags:
        return _change_shape(func, args, kwargs, written, recorder)
    if not interesting((args, kwargs), recorder) and not any(
        t.device.type == "meta" or (recorder is not None and recorder.tracked(t) is not None)
        for t in written
    ):
        return func(*args, **kwargs)
    with recorder.watching() if recorder is not None else nullcontext():
        if func._schema.name.startswith("aten::_foreach_"):
            return _each(func, args, kwargs)
        out = kwargs.get("out") if func.namespace == "aten" else None
        if isinstance(out, torch.Tensor) and kind_of(func).writes == (names.index("out"),):
            rest = {key: value for key, value in kwargs.items() if key != "out"}
            result = func.overloadpacket(*args, **rest)
            if result.size() == out.size():
                return out.copy_(result)
    if len(written) == 1 and isinstance(given[names[kind_of(func).writes[0]]], torch.Tensor):
        return mutate(func, args, kwargs, recorder, written[0])
    raise untraceable(func, (args, kwargs), "it writes to several tensors")


def _change_shape(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    written: list[torch.Tensor],
    recorder: Recorder | None,
) -> Any:
    """``t_``, ``squeeze_``, ``resize_``, ``set_``: plain memory may, a lazy tensor has none."""
    if any(isinstance(t, LazyTensor) for t in tensors_in((args, kwargs))):
        raise untraceable(func, (args, kwargs), "it changes a tensor's shape or memory in place")
    storages = [recorder.tracked(t) if recorder is not None else None for t in written]
    sizes = [t.untyped_storage().nbytes() for t in written]
    out = func(*args, **kwargs)
    if func in (aten.resize_.default, aten.resize_as_.default) and any(
        storage is not None and t.untyped_storage().nbytes() != size
        for t, storage, size in zip(written, storages, sizes, strict=True)
    ):
        raise untraceable(func, (args, kwargs), "it resizes memory that was written to")
    return out


def _each(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``_foreach_mul_(list, ...)``: the plain call on one after the other."""
    name = func._schema.name.removeprefix("aten::_foreach_")
    packet = getattr(aten, name, None)
    if packet is None or not isinstance(args[0], (list, tuple)):
        raise untraceable(func, (args, kwargs), "it writes to a list of tensors")

    def item(tree: Any, i: int) -> Any:
        return tree[i] if isinstance(tree, (list, tuple)) else tree

    for i in range(len(args[0])):
        packet(*(item(a, i) for a in args), **{k: item(v, i) for k, v in kwargs.items()})
    return None


def _map_lazy(tree: Any, make: Callable[[LazyTensor], Any]) -> Any:
    return map_all(tree, lambda t: make(t) if isinstance(t, LazyTensor) else t)


lazy_tensor.set_dispatcher(call)
