"""Copies that were seen before: the same layer again, another layer's number in the names.

A layer's class says with ``loader_looks_at`` which attributes of the layer its weight loader looks
at, beside the parameter and the tensor. Where all of these are equal to what they were once, the
copies are those of then: they are recorded without running the loader, and of what is ``Offered``
no ``LazyTensor`` is made. The word holds for that very class: a subclass may look at more.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from loadkit.local_memory import is_spread
from loadkit.tensor_info import TensorInfo
from loadkit.tracing.lazies import view_of
from loadkit.tracing.lazy_tensor import LazyTensor, Offered
from loadkit.tracing.recorder import active_recorder
from loadkit.tracing.regions import runs_quietly
from loadkit.tracing.storage import FileLeaf, Storage, Value, Write, moment
from loadkit.tracing.view import View, contiguous

__all__ = ["run_loader"]

Loader = Callable[..., Any]

_NOT_LOOKED_AT = ("weight_loader", "parameter_name")


class Copy(NamedTuple):
    """A region of the tensor goes to a region of the parameter, as ``dtype``."""

    target: View
    dtype: torch.dtype
    source: View
    source_dtype: torch.dtype


def run_loader(
    loader: Loader, param: torch.Tensor, offer: torch.Tensor | Offered, *shard: Any
) -> None:
    """Run a weight loader on one tensor, or record what it did with one like it.

    Args:
        loader: called as ``loader(param, tensor, *shard)``.
        param: the parameter.
        offer: the checkpoint tensor.
        shard: the part of the parameter, if one is asked for.
    """
    if not runs_quietly(loader):
        loader(param, _taken(offer), *shard)
        return
    with torch._C.DisableTorchFunction():
        recorder = active_recorder()
        info = None if recorder is None else _info_of(offer)
        key = None if info is None else _key(loader, param, info, shard)
        if recorder is None or info is None or key is None:
            loader(param, _taken(offer), *shard)
            return
        with recorder.lock:
            storage = recorder.track(param)
            try:
                copies = recorder.known_copies.get(key)
            except TypeError:  # it is made of something that may change
                loader(param, _taken(offer), *shard)
                return
            if copies is not None:
                _repeat(copies, storage, offer, info)
                return
            lazy, since = _taken(offer), moment()
            loader(param, lazy, *shard)
            learned = _copies(storage, lazy, since)
            if learned is not None:
                recorder.known_copies[key] = learned


def _info_of(offer: torch.Tensor | Offered) -> TensorInfo | None:
    """The header entry of a checkpoint tensor that is whole and untouched; else None."""
    if isinstance(offer, Offered):
        return offer.info
    if type(offer) is not LazyTensor:
        return None
    storage = offer.lazy_storage
    leaf = storage.base
    if not isinstance(leaf, FileLeaf) or storage.writes or leaf.dtype != offer.dtype:
        return None
    return leaf.info if offer.lazy_view == contiguous(leaf.size, storage.itemsize) else None


def _key(
    loader: Loader, param: torch.Tensor, info: TensorInfo, shard: tuple[Any, ...]
) -> Hashable | None:
    """All that decides what is copied; None where it is not all known. It may hold what has no
    hash.
    """
    owner = getattr(loader, "__self__", None)
    if owner is None:
        says = getattr(loader, "loader_looks_at", None)
    else:
        says = vars(type(owner)).get("loader_looks_at")
    if says is None or param.device.type != "meta" or is_spread(param):
        return None
    held = {} if owner is None else vars(owner)
    seen = tuple([held[name] for name in says if name in held])
    if len(seen) != len(says):  # a property, perhaps: nobody knows what it looks at
        return None
    marks = (mark for mark in vars(param).items() if mark[0] not in _NOT_LOOKED_AT)
    return (
        (getattr(loader, "__func__", loader), type(owner), seen, shard),
        (type(param), view_of(param), param.dtype, *marks),
        (info.shape, info.dtype),
    )


def _repeat(
    copies: tuple[Copy, ...], storage: Storage, offer: torch.Tensor | Offered, info: TensorInfo
) -> None:
    """Record what is copied of a tensor into a parameter's storage."""
    leaf = offer.lazy_storage if isinstance(offer, LazyTensor) else Storage.of_info(info)
    storage.writes += [
        Write(target, dtype, Value(leaf, 0, source, source_dtype))
        for target, dtype, source, source_dtype in copies
    ]


def _copies(storage: Storage, lazy: torch.Tensor, since: int) -> tuple[Copy, ...] | None:
    """What a loader did since a ``moment``; None if it was more than copies of this tensor."""
    writes = [write for write in storage.writes if write.seq > since]
    if moment() - since != len(writes) + 1:
        return None  # it wrote elsewhere too
    if not isinstance(lazy, LazyTensor) or lazy.lazy_storage.writes:
        return None
    copies = []
    for write in writes:
        value = write.value
        if not isinstance(value, Value) or value.storage is not lazy.lazy_storage:
            return None
        if write.mask is not None:
            return None
        copies.append(Copy(write.view, write.dtype, value.view, value.dtype))
    return tuple(copies)


def _taken(offer: torch.Tensor | Offered) -> torch.Tensor:
    return offer.tensor() if isinstance(offer, Offered) else offer
