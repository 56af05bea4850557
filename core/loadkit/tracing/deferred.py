"""Calls whose result is wanted later, and those that must be done now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from loadkit.tracing.lazies import (
    as_lazy,
    contiguous_like,
    leaf_names_in,
    realise,
    to_meta,
    untraceable,
)
from loadkit.tracing.lazy_tensor import LazyTensor
from loadkit.tracing.schema import DYNAMIC, map_all, map_tensors, tensors_in
from loadkit.tracing.storage import Operation, Storage

if TYPE_CHECKING:
    from loadkit.tracing.recorder import Recorder

__all__ = ["defer", "do_now"]


def defer(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], recorder: Recorder | None
) -> Any:
    """Record a call whose result is wanted later; or do it now if its shape depends on data."""
    if torch.Tag.nondeterministic_seeded in func.tags:
        raise untraceable(func, (args, kwargs), "its result is random")
    meta_kwargs = {k: torch.device("meta") if k == "device" else v for k, v in kwargs.items()}
    shadow = map_all((args, meta_kwargs), to_meta)
    try:
        result = func(*shadow[0], **shadow[1])
    except (RuntimeError, NotImplementedError, IndexError, ValueError, TypeError) as error:
        if not _needs_data(func, error):
            raise
        return do_now(func, args, kwargs, recorder)
    if not isinstance(result, (torch.Tensor, tuple, list)) or any(
        t.layout is not torch.strided for t in tensors_in(result)
    ):
        return do_now(func, args, kwargs, recorder)
    values = map_all((args, kwargs), lambda t: as_lazy(t, recorder).lazy_value())
    values = (values[0], {k: v for k, v in values[1].items() if k != "device"})
    several = not isinstance(result, torch.Tensor)
    outputs = iter(range(len(result))) if several else None

    def make(meta: torch.Tensor) -> LazyTensor:
        view = contiguous_like(meta)
        output = next(outputs) if outputs is not None else None
        operation = Operation(func, values[0], values[1], output, view, meta.dtype)
        storage = Storage(operation, view.span()[1] // view.itemsize, meta.dtype.itemsize)
        return LazyTensor(storage, view, meta.dtype)

    return map_tensors(result, make)


def _needs_data(func: Any, error: Exception) -> bool:
    """Whether a call failed on meta because its result depends on numbers."""
    if isinstance(error, NotImplementedError) or DYNAMIC & set(func.tags):
        return True
    text = str(error)
    return any(word in text.lower() for word in ("meta", "nonzero", "fake impl"))


def do_now(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], recorder: Recorder | None
) -> Any:
    """Make the call on real numbers, read now."""
    real = map_all((args, kwargs), lambda t: realise(t, recorder))
    result = func(*real[0], **real[1])
    if recorder is not None:
        names = sorted(leaf_names_in((args, kwargs)))
        for tensor in tensors_in(result) if names else ():
            recorder.note_source(tensor, names[0])
    return result
