"""Which bytes of a storage a replay of its writes gives a value: known without any data."""

from __future__ import annotations

import torch

from loadkit.tracing.storage import Operation, Storage, Unwritten
from loadkit.tracing.view import View

__all__ = ["bytes_under", "holes", "known_bytes"]


def known_bytes(storage: Storage, version: int) -> torch.Tensor:
    """A flag per byte of the storage: whether its base or one of the writes gave it a value."""
    base = storage.base
    known = torch.zeros(storage.numel * storage.itemsize, dtype=torch.bool)
    if isinstance(base, Operation):
        bytes_under(known, base.view).fill_(True)
    elif not isinstance(base, Unwritten):
        known.fill_(True)
    for write in storage.writes[:version]:
        if write.view.numel == 0:
            continue
        under = bytes_under(known, write.view)
        if write.mask is None:
            under.fill_(True)
        else:
            under |= write.mask.view(write.view.size).unsqueeze(-1)
    return known


def bytes_under(known: torch.Tensor, view: View) -> torch.Tensor:
    """The flags under a view, one more dimension: the bytes of an element."""
    size = view.itemsize
    stride = tuple(s * size for s in view.stride)
    return known.as_strided((*view.size, size), (*stride, 1), view.offset * size)


def holes(storage: Storage, version: int, view: View) -> int:
    """How many elements of a view have no value."""
    if not isinstance(storage.base, (Unwritten, Operation)):
        return 0
    known = bytes_under(known_bytes(storage, version), view)
    return int((~known.all(-1)).sum())
