"""Plain tensors as lazy ones, lazy ones as plain: the ground the calls stand on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from loadkit.errors import TraceError
from loadkit.tracing.lazy_tensor import LazyTensor, leaf_names
from loadkit.tracing.reading import read_now, storage_of_plain
from loadkit.tracing.schema import tensors_in
from loadkit.tracing.storage import Constant, Fill, Storage, Unwritten
from loadkit.tracing.view import View, contiguous

if TYPE_CHECKING:
    from loadkit.tracing.recorder import Recorder

__all__ = [
    "as_lazy",
    "blank_like",
    "contiguous_like",
    "interesting",
    "leaf_names_in",
    "meta_like",
    "realise",
    "scratch",
    "to_meta",
    "track",
    "untraceable",
    "view_of",
]


def interesting(tree: Any, recorder: Recorder | None) -> bool:
    """Whether any tensor in it is lazy, or plain memory that recorded writes changed."""
    return any(
        isinstance(t, LazyTensor) or (recorder is not None and recorder.is_changed(t))
        for t in tensors_in(tree)
    )


def as_lazy(tensor: torch.Tensor, recorder: Recorder | None) -> LazyTensor:
    """The tensor as a lazy one. Real memory is copied: code may change it later, unseen."""
    if isinstance(tensor, LazyTensor):
        return tensor
    if tensor.device.type != "meta" and (recorder is None or recorder.tracked(tensor) is None):
        source = recorder.source_of(tensor) if recorder is not None else None
        plain = tensor.detach()
        for dim, stride in enumerate(plain.stride()):
            if stride == 0 and plain.size(dim) > 1:
                plain = plain.narrow(dim, 0, 1)
        now = plain.to("cpu", copy=True, memory_format=torch.contiguous_format)
        base = Constant(now.resolve_conj().resolve_neg().reshape(-1), source)
        view = contiguous(tuple(plain.size()), tensor.dtype.itemsize)
        storage = Storage(base, view.numel, view.itemsize)
        return LazyTensor(storage, view.expand(tuple(tensor.size())), tensor.dtype)
    storage = track(tensor, recorder)
    return LazyTensor(storage, view_of(tensor), tensor.dtype)


def track(tensor: torch.Tensor, recorder: Recorder | None) -> Storage:
    """The recorded storage behind a plain tensor."""
    if recorder is not None:
        return recorder.track(tensor)
    return storage_of_plain(tensor)


def view_of(tensor: torch.Tensor) -> View:
    """A tensor's layout."""
    return View(
        tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()), tensor.dtype.itemsize
    )


def meta_like(tensor: torch.Tensor) -> torch.Tensor:
    """A meta tensor of the same dtype and layout, offset included."""
    view = view_of(tensor)
    extent = max(view.span()[1] // view.itemsize, 0)
    return torch.empty(extent, dtype=tensor.dtype, device="meta").as_strided(
        view.size, view.stride, view.offset
    )


def to_meta(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it is on meta, else one of its layout that is."""
    return tensor if tensor.device.type == "meta" else meta_like(tensor)


def contiguous_like(meta: torch.Tensor) -> View:
    """The layout a fresh result has: its strides, from offset 0."""
    return View(tuple(meta.size()), meta.stride(), 0, meta.dtype.itemsize)


def realise(tensor: torch.Tensor, recorder: Recorder | None) -> torch.Tensor:
    """The tensor's numbers, read now. Recorded as a read of the plan."""
    if not isinstance(tensor, LazyTensor):
        if recorder is None or not (recorder.is_changed(tensor) or tensor.device.type == "meta"):
            return tensor
        tensor = as_lazy(tensor, recorder)
    return read_now(tensor.lazy_value(), recorder)


def scratch(size: tuple[int, ...], dtype: torch.dtype, base: Fill | Unwritten) -> LazyTensor:
    """A fresh row-major lazy buffer."""
    view = contiguous(size, dtype.itemsize)
    return LazyTensor(Storage(base, view.numel, dtype.itemsize, scratch=True), view, dtype)


def blank_like(target: torch.Tensor) -> LazyTensor:
    """A lazy tensor of zeros of the target's size and dtype."""
    storage = Storage(Fill(0, target.dtype), target.numel(), target.dtype.itemsize)
    return LazyTensor(
        storage, contiguous(tuple(target.size()), target.dtype.itemsize), target.dtype
    )


def untraceable(func: Any, tree: Any, why: str) -> TraceError:
    """The error of a call that cannot be recorded; names the tensors concerned."""
    listed = sorted(leaf_names_in(tree))
    return TraceError(
        f"{func} cannot be recorded: {why}",
        tensor=listed[0] if listed else None,
        detail={"tensors": listed},
    )


def leaf_names_in(tree: Any) -> set[str]:
    """The checkpoint tensors behind the lazy tensors of a tree."""
    return {
        name
        for tensor in tensors_in(tree)
        if isinstance(tensor, LazyTensor)
        for name in leaf_names(tensor.lazy_value())
    }
