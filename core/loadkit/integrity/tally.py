"""Which units of files are touched, verified and viewed: once in a plan, and once in its load."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from loadkit.integrity.digests import FileDigests
from loadkit.readers.windows import merged

__all__ = ["Tally"]


class Tally:
    """Counts by file (``id``) and unit number. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._touched: dict[int, set[int]] = {}
        self._verified: dict[int, set[int]] = {}
        self._claims: dict[tuple[int, int], threading.Lock] = {}
        self._viewed: dict[int, list[tuple[int, int]]] = {}

    def touch(self, digests: FileDigests, units: Iterable[int]) -> None:
        """Bytes of these units are used: each has to be verified before the end."""
        with self._lock:
            self._touched.setdefault(id(digests.file), set()).update(units)

    def verify(self, digests: FileDigests, unit: int) -> None:
        """A unit was verified, or will have been."""
        with self._lock:
            self._verified.setdefault(id(digests.file), set()).add(unit)

    def is_verified(self, digests: FileDigests, unit: int) -> bool:
        """Whether a unit was verified."""
        with self._lock:
            return unit in self._verified.get(id(digests.file), ())

    def claimed(self, digests: FileDigests, unit: int) -> threading.Lock:
        """The lock of a unit: who verifies it holds it."""
        with self._lock:
            return self._claims.setdefault((id(digests.file), unit), threading.Lock())

    def view(self, digests: FileDigests, start: int, end: int) -> None:
        """Bytes are used through a mapping, and counted as read."""
        with self._lock:
            self._viewed.setdefault(id(digests.file), []).append((start, end))
        self.touch(digests, digests.touching(start, end))

    def is_mapped(self, digests: FileDigests) -> bool:
        """Whether any of the file is used through a mapping."""
        with self._lock:
            return id(digests.file) in self._viewed

    def is_touched(self, digests: FileDigests) -> bool:
        """Whether any byte of the file is used."""
        with self._lock:
            return bool(self._touched.get(id(digests.file)))

    def left(self, digests: FileDigests) -> list[int]:
        """Units that were touched and not verified, in order."""
        with self._lock:
            touched = self._touched.get(id(digests.file), set())
            return sorted(touched - self._verified.get(id(digests.file), set()))

    def unseen(self, digests: FileDigests, units: Iterable[int]) -> int:
        """Bytes of these units that no view counted as read."""
        with self._lock:
            viewed = merged(self._viewed.get(id(digests.file), ()))
        total = at = 0
        for unit in units:
            start, end = digests.unit(unit)
            total += end - start
            while at < len(viewed) and viewed[at][1] <= start:
                at += 1
            near = at
            while near < len(viewed) and viewed[near][0] < end:
                total -= min(end, viewed[near][1]) - max(start, viewed[near][0])
                near += 1
        return total
