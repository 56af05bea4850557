"""Bytes from every rank to every other at once, over a gloo group of a load's own.

A group of its own, so that a load that fails leaves the caller's as it was, and so that the
caller's may be of any backend. Waiting is left to a helper thread: gloo waits cannot be
interrupted, and a rank that waits must still hear that another has failed, and its user's Ctrl-C.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

from loadkit.rank_board import PeerLost

__all__ = ["Exchange"]

_PATIENCE = 10  # timeouts of a silent rank that a slow one may keep others waiting in one exchange
_ABORT_TAG = 1 << 30
_JOIN = 2.0  # seconds


class Exchange:
    """One rank's connections to all others.

    Args:
        store: of ``torch.distributed``; nobody else uses its keys.
        rank: this one, of ``len(names)``.
        names: what the ranks are called, for errors.
        timeout: seconds that a rank may be silent.
        check: raises when a rank has failed; called while this one waits.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        names: list[str],
        *,
        timeout: float,
        check: Callable[[], None],
    ) -> None:
        self._rank = rank
        self._names = names
        self._check = check
        self._group: Any = None
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True, name="loadkit-exchange")
        self._thread.start()
        patience = timedelta(seconds=_PATIENCE * timeout)
        self._begin(lambda: self._connect(store, len(names), patience))
        try:
            self.wait()
        except BaseException:
            self.close()
            raise

    def start(
        self, number: int, sends: Mapping[int, torch.Tensor], takes: Mapping[int, torch.Tensor]
    ) -> None:
        """Send and receive in the background, until ``wait``.

        Args:
            number: of this exchange; the same on both ends.
            sends: rank -> what it gets: 1-d uint8 CPU memory that nobody writes until ``wait``.
            takes: rank -> memory for what comes from it, of exactly that size.
        """
        self._begin(lambda: self._move(number, sends, takes))

    def wait(self) -> None:
        """Until everything that was started is through.

        Raises:
            PeerLost: a connection broke off.
            RankFailed: a rank has failed, by whatever ``check`` raises.
        """
        while not self._idle.wait(0.1):
            self._check()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the connections, in the middle of an exchange too, and the thread."""
        if not self._idle.is_set() and self._group is not None:
            self._abort()
        self._tasks.put(None)
        self._thread.join(_JOIN)
        self._group = None

    def _abort(self) -> None:
        """Break off all that the group does: a wait that times out has that effect.

        gloo has no call for it. A wait for a rank whose connection is broken already does not time
        out, so every rank is tried.
        """
        for peer in range(len(self._names)):
            if peer != self._rank:
                with suppress(RuntimeError):
                    waiting = self._group.recv([torch.empty(1)], peer, _ABORT_TAG)
                    waiting.wait(timedelta(milliseconds=1))

    # -- on the helper thread ----------------------------------------------------------------------

    def _begin(self, task: Callable[[], None]) -> None:
        self._idle.clear()
        self._tasks.put(task)

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except BaseException as error:  # noqa: BLE001 - ``wait`` raises it
                self._error = error
            del task
            self._idle.set()

    def _connect(self, store: Any, size: int, patience: timedelta) -> None:
        import torch.distributed as dist

        try:
            self._group = dist.ProcessGroupGloo(store, self._rank, size, patience)
        except RuntimeError as error:
            raise self._lost((self._rank + 1) % size, error) from error

    def _move(
        self, number: int, sends: Mapping[int, torch.Tensor], takes: Mapping[int, torch.Tensor]
    ) -> None:
        works: list[tuple[int, Any]] = []
        try:
            for peer, memory in takes.items():
                works.append((peer, self._started(self._group.recv, memory, peer, number)))
            for peer, memory in sends.items():
                works.append((peer, self._started(self._group.send, memory, peer, number)))
            for peer, work in works:
                try:
                    work.wait()
                except RuntimeError as error:
                    raise self._lost(peer, error) from error
        finally:
            works.clear()  # a work keeps its connection open

    def _started(self, call: Any, memory: torch.Tensor, peer: int, number: int) -> Any:
        try:
            return call([memory], peer, number)
        except RuntimeError as error:
            raise self._lost(peer, error) from error

    def _lost(self, peer: int, error: Exception) -> PeerLost:
        first = str(error).partition(". This is typically")[0].rpartition("] ")[2]
        lost = PeerLost(f"the connection to {self._names[self._rank]} broke off: {first}")
        lost.peer = peer
        return lost
