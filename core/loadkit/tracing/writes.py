"""How a write is recorded: a view of a storage, and the value that it got."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from loadkit.errors import TraceError
from loadkit.tracing.lazies import as_lazy, track, view_of
from loadkit.tracing.lazy_tensor import LazyTensor, leaf_names
from loadkit.tracing.storage import Fill, Value, Write

if TYPE_CHECKING:
    from loadkit.tracing.recorder import Recorder

__all__ = ["note_foreign_write", "record", "record_copy"]


def record(
    target: torch.Tensor,
    value: Value | Fill,
    recorder: Recorder | None,
    mask: torch.Tensor | None = None,
) -> None:
    """Append one write to the target's storage.

    Raises:
        TraceError: several of its elements are one in memory, or a numpy array sees it too.
    """
    view = view_of(target)
    if not view.is_apart():
        raise TraceError(
            f"a write to a tensor of size {list(view.size)} and strides {list(view.stride)}, in "
            "which several elements are one in memory, cannot be recorded"
        )
    if (
        recorder is not None
        and not isinstance(target, LazyTensor)
        and target.device.type == "cpu"
        and recorder.tracked(target) is None
        and not target.untyped_storage().resizable()
    ):
        names = sorted(leaf_names(value)) if isinstance(value, Value) else []
        raise TraceError(
            "a tensor that shares its memory with something outside of torch is written to",
            tensor=names[0] if names else None,
            detail={"tensors": names},
        )
    storage = target.lazy_storage if isinstance(target, LazyTensor) else track(target, recorder)
    storage.writes.append(Write(view, target.dtype, value, mask))


def record_copy(
    target: torch.Tensor,
    source: torch.Tensor,
    recorder: Recorder | None,
    mask: torch.Tensor | None = None,
) -> None:
    """Record that ``source``, broadcast, was copied into ``target``, where ``mask`` is true."""
    if _is_number(source, recorder) and mask is None:
        number = source.detach().to(target.dtype).reshape(()).item()
        record(target, Fill(number, target.dtype), recorder)
        return
    value = as_lazy(source, recorder).lazy_value()
    try:
        wide = value.view.expand(tuple(target.size()))
    except ValueError:
        raise RuntimeError(
            f"a tensor of size {list(source.size())} does not fit into {list(target.size())}"
        ) from None
    record(target, Value(value.storage, value.version, wide, value.dtype), recorder, mask)


def _is_number(source: torch.Tensor, recorder: Recorder | None) -> bool:
    """Whether it is a plain number, and no checkpoint tensor's."""
    if isinstance(source, LazyTensor) or source.dim() or source.device.type != "cpu":
        return False
    return recorder is None or (
        recorder.tracked(source) is None and recorder.source_of(source) is None
    )


def note_foreign_write() -> None:
    """A thread that is not recorded tried to write: the recording under way must know."""
    from loadkit.tracing import recorder

    if recorder._active is not None:
        recorder._active.foreign_writes += 1
