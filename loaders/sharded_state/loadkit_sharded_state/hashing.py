"""Digests of a file and of each of its tensors, computed while it is written."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loadkit.safetensors_writer import Sink

__all__ = ["HashingSink"]

_SMALL = 1 << 16  # bytes; below, handing work to a thread costs more than the work


class HashingSink:
    """Hands bytes on to a sink and hashes them in two threads meanwhile (SHA-256)."""

    def __init__(self, out: Sink, pool: ThreadPoolExecutor) -> None:
        self._out, self._pool = out, pool
        self._file = hashlib.sha256()
        self._tensors: dict[str, hashlib._Hash] = {}

    def write(self, data: memoryview | bytes, tensor: str | None = None) -> None:
        """Take all of ``data``."""
        hashes = [self._file]
        if tensor is not None:
            hashes.append(self._tensors.setdefault(tensor, hashlib.sha256()))
        if len(data) < _SMALL:
            for one in hashes:
                one.update(data)
            self._out.write(data, tensor)
            return
        running = [self._pool.submit(one.update, data) for one in hashes]
        try:
            self._out.write(data, tensor)
        finally:
            for future in running:
                future.result()

    @property
    def sha256(self) -> str:
        """Of everything so far."""
        return self._file.hexdigest()

    def tensor(self, name: str) -> str:
        """Of one tensor; one without bytes has the digest of nothing."""
        found = self._tensors.get(name)
        return (found or hashlib.sha256()).hexdigest()
