"""The copy that nearly every weight loader ends in, recorded without a detour through torch.

A loader that narrows and copies is seen by the recorder anyway. One that says which region goes
where is seen at a tenth of the cost: the views are computed here, in plain integers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from loadkit.tracing.lazies import view_of
from loadkit.tracing.lazy_tensor import LazyTensor
from loadkit.tracing.recorder import active_recorder
from loadkit.tracing.storage import Value, Write

__all__ = ["Cut", "copies_regions", "copy_region", "runs_quietly"]

LoaderT = TypeVar("LoaderT", bound="Callable[..., Any]")


Cut = tuple[int, int, int, int]
"""(dim, start, length, source): along ``dim`` the parameter's [start, start + length) is the
tensor's [source, source + length)."""


def copy_region(
    param: torch.Tensor, loaded: torch.Tensor, cuts: Iterable[Cut] = (), *, at: tuple[int, ...] = ()
) -> None:
    """Copy a region of a checkpoint tensor into a region of a parameter, cast to its dtype.

    Args:
        param: the parameter, any device.
        loaded: the checkpoint tensor, of ``param``'s dims without those that ``at`` picks.
        cuts: at most one per dim (of ``loaded``); dims without one are taken whole. The caller has
            checked the shapes.
        at: index into the leading dims of ``param`` (an expert's number).
    """
    recorder = active_recorder()
    if recorder is None or type(loaded) is not LazyTensor or param.device.type != "meta":
        _copy(param, loaded, cuts, at)
        return
    target, value = view_of(param), loaded.lazy_value()
    for index in at:
        target = target.narrow(0, index, 1)._replace(size=target.size[1:], stride=target.stride[1:])
    source = value.view
    for dim, start, length, source_start in cuts:
        dim %= len(target.size)
        if length != target.size[dim]:
            target = target.narrow(dim, start, length)
        if length != source.size[dim]:
            source = source.narrow(dim, source_start, length)
    if source.size != target.size or not target.is_apart():
        _copy(param, loaded, cuts, at)  # it says what is wrong
        return
    with recorder.lock:
        writes = recorder.track(param).writes
        writes.append(
            Write(target, param.dtype, Value(value.storage, value.version, source, value.dtype))
        )


def _copy(
    param: torch.Tensor, loaded: torch.Tensor, cuts: Iterable[Cut], at: tuple[int, ...]
) -> None:
    target, source = param.data, loaded
    for index in at:
        target = target.select(0, index)
    for dim, start, length, source_start in cuts:
        if length != target.shape[dim]:
            target = target.narrow(dim, start, length)
        if length != source.shape[dim]:
            source = source.narrow(dim, source_start, length)
    target.copy_(source)


def copies_regions(loader: LoaderT) -> LoaderT:
    """Mark a weight loader that touches tensors by ``copy_region`` and plain views alone.

    Torch's function modes need not look on while it runs.
    """
    loader.copies_regions = True  # type: ignore[attr-defined]
    return loader


def runs_quietly(loader: Callable[..., Any]) -> bool:
    """Whether a weight loader is marked so."""
    return getattr(loader, "copies_regions", False) is True
