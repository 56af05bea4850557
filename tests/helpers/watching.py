"""What a load does, watched from inside: reads of files, live tensors, threads."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

__all__ = ["Reads", "live_bytes", "loadkit_threads", "watched_reads"]


class Reads:
    """Every ``preadv``: descriptor's inode, offset, bytes asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []
        self._lock = threading.Lock()

    def note(self, descriptor: int, buffers: Any, offset: int) -> None:
        asked = sum(len(buffer) for buffer in buffers)
        with self._lock:
            self.calls.append((os.fstat(descriptor).st_ino, offset, asked))

    @property
    def nbytes(self) -> int:
        return sum(asked for _, _, asked in self.calls)


@contextmanager
def watched_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    """Count what goes through ``os.preadv``, from any thread."""
    reads = Reads()
    real = os.preadv

    def preadv(descriptor: int, buffers: Any, offset: int, *flags: int) -> int:
        reads.note(descriptor, buffers, offset)
        return real(descriptor, buffers, offset, *flags)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        yield reads


def live_bytes(at_least: int = 1) -> int:
    """Memory of all tensors that live, each storage once; storages below a size do not count."""
    gc.collect()
    sizes: dict[int, int] = {}
    for item in gc.get_objects():
        if type(item) in (torch.Tensor, torch.nn.Parameter) and item.device.type == "cpu":
            storage = item.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(size for size in sizes.values() if size >= at_least)


def loadkit_threads() -> list[str]:
    """Names of threads that loadkit started and that run."""
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("loadkit-"))
