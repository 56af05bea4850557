"""Signs of life between processes: each counts in a store, and others see whether the count moves.

A process that was killed, crashed or stopped counts no more. Whoever starts ranks watches all of
them so, and ranks that load together watch each other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

__all__ = ["Pulse", "Silence", "Watch", "beat_seconds"]

_LEFT = b"left"


class Silence(NamedTuple):
    """A rank that has given no sign of life for some seconds."""

    rank: int
    seconds: float


def beat_seconds(limit: float) -> float:
    """Seconds between two signs of life, where a silence of ``limit`` seconds is too long."""
    return min(1.0, limit / 5)


def _key(rank: int) -> str:
    return f"beat/{rank}"


class Pulse:
    """One rank's signs of life in a store; ``beat`` gives one, ``start`` a thread that does."""

    def __init__(self, store: Any, rank: int, pause: float) -> None:
        self._store = store
        self._key = _key(rank)
        self._pause = pause
        self._count = 0
        self._due = 0.0

    def beat(self) -> None:
        """Give a sign of life, if it is time for one."""
        now = time.monotonic()
        if now >= self._due:
            self._count += 1
            self._store.set(self._key, str(self._count))
            self._due = now + self._pause

    def leave(self) -> None:
        """Say that this rank is done: its silence means nothing from now on."""
        self._store.set(self._key, _LEFT.decode())

    def start(self) -> None:
        """Beat from a thread of its own until the process or the store ends."""
        threading.Thread(target=self._run, daemon=True, name="loadkit-pulse").start()

    def _run(self) -> None:
        with suppress(Exception):  # the store is gone: who holds it looks after this process
            while True:
                self.beat()
                time.sleep(self._pause)


class Watch:
    """Who of some ranks has fallen silent. A time in which the watcher stood still counts not.

    Args:
        store: the one that the ranks beat in.
        limit: seconds of silence that are too many.
    """

    def __init__(self, store: Any, limit: float) -> None:
        self._store = store
        self._limit = limit
        self._pause = beat_seconds(limit) / 2
        self._looked = time.monotonic()
        self._heard: dict[int, float] = {}
        self._count: dict[int, bytes] = {}

    def add(self, ranks: Iterable[int]) -> None:
        """Watch more ranks from now on."""
        self._heard |= dict.fromkeys(ranks, time.monotonic())

    def look(self) -> Silence | None:
        """The rank that is silent for too long, if there is one."""
        now = time.monotonic()
        passed = now - self._looked
        if passed < self._pause:
            return None
        self._looked = now
        stood_still = max(0.0, passed - 2 * self._pause)
        worst: Silence | None = None
        for rank in list(self._heard):
            self._heard[rank] += stood_still
            count = self._read(rank)
            if count == _LEFT:
                del self._heard[rank]
                continue
            if count is not None and count != self._count.get(rank):
                self._count[rank] = count
                self._heard[rank] = now
            seconds = now - self._heard[rank]
            if seconds > self._limit and (worst is None or seconds > worst.seconds):
                worst = Silence(rank, seconds)
        return worst

    def _read(self, rank: int) -> bytes | None:
        """A rank's count; None where it has not begun. Never waits for one."""
        if not self._store.check([_key(rank)]):
            return None
        found: bytes = self._store.get(_key(rank))
        return found
