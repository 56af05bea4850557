"""The digests of a file that is written in order: of all of it, and of each of its tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loadkit.conversion.files import PlannedFile

__all__ = ["FileDigest"]

_SMALL = 1 << 16  # bytes; below, handing work to a thread costs more than the work


class FileDigest:
    """Takes a file's bytes from its first one on.

    Args:
        file: says where its tensors lie.
        pool: two threads, one for each of the two digests of a byte.
    """

    def __init__(self, file: PlannedFile, pool: ThreadPoolExecutor) -> None:
        self._file, self._pool = file, pool
        self._whole = hashlib.sha256()
        self._tensors: list[hashlib._Hash] = []
        entries = file.layout.entries
        self._ends = [len(file.layout.head)]
        for entry in entries:
            self._ends.append(self._ends[-1] + entry.nbytes)
        self.size = 0

    def copy(self) -> FileDigest:
        """The same, to go on from here once more."""
        other = FileDigest(self._file, self._pool)
        other._whole, other.size = self._whole.copy(), self.size
        other._tensors = [one.copy() for one in self._tensors]
        return other

    def update(self, data: memoryview | bytes, meanwhile: Callable[[], None] | None = None) -> None:
        """The next bytes; ``meanwhile`` is called while they are hashed."""
        small = len(data) < _SMALL
        running = [] if small else [self._pool.submit(self._whole.update, data)]
        running += [] if small else [self._pool.submit(self._by_tensor, memoryview(data))]
        try:
            if meanwhile is not None:
                meanwhile()
        finally:
            for future in running:
                future.result()
        if small:
            self._whole.update(data)
            self._by_tensor(memoryview(data))
        self.size += len(data)

    def _by_tensor(self, data: memoryview) -> None:
        at = self.size
        while data:
            while len(self._tensors) < len(self._ends) and self._begins(at):
                self._tensors.append(hashlib.sha256())
            count = min(len(data), self._ends[len(self._tensors)] - at)
            if self._tensors:
                self._tensors[-1].update(data[:count])
            data, at = data[count:], at + count

    def _begins(self, at: int) -> bool:
        """Whether the tensor that was hashed last (the head, at first) has ended before ``at``."""
        return self._ends[len(self._tensors)] <= at

    @property
    def sha256(self) -> str:
        """Of all bytes so far."""
        return self._whole.hexdigest()

    def tensors(self) -> dict[str, str]:
        """Of each tensor by name, once all bytes are in."""
        found = [one.hexdigest() for one in self._tensors]
        found += [hashlib.sha256().hexdigest()] * (len(self._file.layout.entries) - len(found))
        names = [entry.name for entry in self._file.layout.entries]
        return dict(zip(names, found, strict=True))
