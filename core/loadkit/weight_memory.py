"""Memory for weights that a load will fill: none while a model is built on meta.

A parameter that is made with real memory and then turned to meta costs a recorded call of torch
twice over; of 20,000 tensors that is half a second.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from loadkit.tracing.recorder import active_recorder

__all__ = ["empty_weight", "full_weight", "weights_on_meta"]


class _Thread(threading.local):
    on_meta = False


_thread = _Thread()


@contextmanager
def weights_on_meta() -> Iterator[None]:
    """``empty_weight`` gives tensors on meta in this thread."""
    before, _thread.on_meta = _thread.on_meta, True
    try:
        yield
    finally:
        _thread.on_meta = before


def empty_weight(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor that nobody has written to, to be registered as a parameter as it is.

    Args:
        shape: its sizes.
        dtype: of its elements.

    Returns:
        ``torch.empty`` on torch's default device; on meta where parameters would be turned to it.
    """
    if not _thread.on_meta:
        return torch.empty(tuple(shape), dtype=dtype)
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        return torch.empty(tuple(shape), dtype=dtype, device="meta")


def full_weight(shape: Sequence[int], value: float, dtype: torch.dtype | None) -> torch.Tensor:
    """As ``empty_weight``, for a parameter that starts as one number.

    A recording of the construction knows the number without memory that holds it.

    Args:
        shape: its sizes.
        value: of every element.
        dtype: of its elements; None: torch's default dtype.
    """
    dtype = dtype or torch.get_default_dtype()
    if not _thread.on_meta:
        return torch.full(tuple(shape), value, dtype=dtype)
    weight = empty_weight(shape, dtype)
    recorder = active_recorder()
    if recorder is not None:
        recorder.note_fill(weight, value)
    return weight
