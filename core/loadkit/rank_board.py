"""What ranks that work together tell each other: that they live, and how each step went.

All of it goes through the store that the ranks' process group was made with, over a connection of
its own and on a thread of its own: nobody who waits for others can be kept waiting by one that is
gone, stopped, or holds the store.
"""

from __future__ import annotations

import pickle
import queue
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from loadkit.errors import DistributedError, LoadkitError
from loadkit.rank_failures import Failure, root_cause, silent, state_of
from loadkit.rank_pulse import Pulse, Watch, beat_seconds

__all__ = ["Board", "PeerLost", "RankFailed"]

T = TypeVar("T")

_CHUNK = 1 << 20  # bytes of one value in a store, which takes 8 MiB at most
_NEIGHBOURS = 4  # ranks that each rank watches
_LOOK = 0.25  # seconds between two looks for failures
_SETTLING = 0.3  # seconds for the cause to arrive after a failure that stands for itself
_SETTLING_INDIRECT = 2.0  # and after one that only says that another rank is gone
_LEAVING = 1.0  # seconds for the last words of a rank that leaves
_ORDER, _FAILED = "order", "failed"


class RankFailed(DistributedError):  # noqa: N818 - never leaves loadkit: the cause is raised for it
    """Another rank has failed; what it said is on the board."""


class PeerLost(DistributedError):  # noqa: N818 - as RankFailed
    """A connection to another rank, ``peer``, broke off; why may be on the board soon."""

    peer: int = 0


class Board:
    """One rank's place among those that work together.

    Args:
        store: of ``torch.distributed``; nobody else uses its keys.
        rank: this one, of ``size``.
        timeout: seconds of silence after which a rank is given up.

    Attributes:
        names: what the ranks are called.
        pids: the processes of those that run on this machine.
    """

    def __init__(self, store: Any, rank: int, size: int, *, timeout: float) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.names = [f"rank {each} of {size}" for each in range(size)]
        self.pids: dict[int, int] = {}
        with suppress(RuntimeError, NotImplementedError, AttributeError):
            store = store.clone()
        self._store = store
        self._pulse = Pulse(store, rank, beat_seconds(timeout))
        self._watch = Watch(store, timeout)
        self._requests: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._requests = queue.SimpleQueue()
        self._failed = threading.Event()
        self._spoke = self._checked = self._awake = time.monotonic()
        self._lost: Exception | None = None
        self._published = False
        self._spent: list[str] = []  # keys of what every rank has taken
        self._thread = threading.Thread(target=self._serve, daemon=True, name="loadkit-ranks")
        self._thread.start()

    def know(self, names: Sequence[str], pids: dict[int, int]) -> None:
        """Take what the ranks are called and their processes on this machine; watch them."""
        self.names = list(names)
        self.pids = pids
        ahead = [(self.rank + step) % self.size for step in range(1, _NEIGHBOURS + 1)]
        self._ask(lambda: self._watch.add({rank for rank in ahead if rank != self.rank}))

    def exchange(
        self, what: str, mine: bytes = b"", *, patience: float | None = None
    ) -> list[bytes]:
        """Give every rank something and take what each gives; waits for all of them.

        Args:
            what: the same on every rank, and used once.
            mine: what this rank gives.
            patience: seconds for all to come; without, a rank may take its time while it lives.

        Raises:
            RankFailed: a rank has failed.
            DistributedError: a rank did not come in time, or the store is gone.
        """
        self._ask(lambda: self._put(f"{what}/{self.rank}", mine))
        self._ask(lambda: self._store.add(f"{what}/all", 1))
        began = time.monotonic()
        pause = 0.002
        while self._ask(lambda: int(self._store.add(f"{what}/all", 0))) < self.size:
            self.check()
            waited = time.monotonic() - began
            if patience is not None and waited > patience:
                raise self._not_there(what, waited)
            time.sleep(pause)
            pause = min(0.05, pause * 1.5)
        found = [self._ask(partial(self._take, f"{what}/{rank}")) for rank in range(self.size)]
        spent, self._spent = self._spent, [f"{what}/{self.rank}"]
        for key in spent:
            self._ask(partial(self._forget, key))
        return found

    def check(self) -> None:
        """Raise if a rank has failed; takes no time.

        Raises:
            RankFailed: ``cause`` knows why.
            DistributedError: the store is gone.
        """
        if self._failed.is_set():
            raise RankFailed("another rank has failed")
        if self._lost is not None:
            raise self._gone()
        now = time.monotonic()
        if now - self._checked > self.timeout / 2:
            self._awake = now  # this process itself may have stood still
        self._checked = now
        self._require_answers(max(self._spoke, self._awake), self.timeout)

    def fail(self, failure: Failure) -> None:
        """Tell every rank that something has failed. What cannot be told is not."""
        if not self._published:
            self._published = True
            with suppress(DistributedError):
                self._ask(lambda: self._publish(failure))

    def cause(self) -> LoadkitError:
        """What every rank is to raise, once a rank has failed: the first cause that was told."""
        first: float | None = None
        while True:
            failures = self._ask(self._failures)
            now = time.monotonic()
            first = first or now
            direct = any(not failure.indirect for failure in failures)
            if now - first >= (_SETTLING if direct else _SETTLING_INDIRECT):
                if failures:
                    return root_cause(failures, [], self.names)
                return DistributedError("another rank has failed and did not say how")
            time.sleep(0.05)

    def pid_of(self, rank: int, patience: float) -> int | None:
        """The process of a rank that may be ending, once it has; None if it is not of this machine.

        It is waited for ``patience`` seconds, and not while a failure is known.
        """
        pid = self.pids.get(rank)
        until = time.monotonic() + patience
        while pid is not None and not self._failed.is_set() and time.monotonic() < until:
            if state_of(pid) == "ended":
                break
            time.sleep(0.02)
        return pid

    def close(self) -> None:
        """Leave. The thread ends, unless the store does not answer any more."""
        with suppress(DistributedError):
            self._ask(self._pulse.leave, _LEAVING)
        self._requests.put(None)
        self._thread.join(_LEAVING)

    # -- on the board's own thread -----------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while True:
                self._tick()
                until = time.monotonic() + min(_LOOK, beat_seconds(self.timeout))
                while (left := until - time.monotonic()) > 0:
                    try:
                        request = self._requests.get(timeout=left)
                    except queue.Empty:
                        break
                    if request is None:
                        return
                    self._answer(*request)
        except Exception as error:  # noqa: BLE001 - whatever a store raises when it is gone
            self._lost = error

    def _answer(self, request: Callable[[], Any], future: Future[Any]) -> None:
        try:
            future.set_result(request())
        except Exception as error:
            future.set_exception(error)
            raise
        finally:
            self._spoke = time.monotonic()

    def _tick(self) -> None:
        self._pulse.beat()
        if not self._failed.is_set():
            silence = self._watch.look()
            if silence is not None:
                pid = self.pids.get(silence.rank)
                self._publish(silent(silence.rank, silence.seconds, pid, started=True))
            if self._store.check([_FAILED]):
                self._failed.set()
        self._spoke = time.monotonic()

    def _publish(self, failure: Failure) -> None:
        when = int(self._store.add(_ORDER, 1))
        self._put(f"failure/{self.rank}", pickle.dumps(replace(failure, when=when)))
        self._store.set(_FAILED, "1")

    def _failures(self) -> list[Failure]:
        keys = [f"failure/{rank}" for rank in range(self.size)]
        return [
            pickle.loads(self._take(key))  # noqa: S301, TID251 - from a rank of this very load
            for key in keys
            if self._store.check([key])
        ]

    def _put(self, key: str, value: bytes) -> None:
        is_packed = len(value) > 1024
        packed = zlib.compress(value, 1) if is_packed else value
        chunks = [packed[at : at + _CHUNK] for at in range(0, len(packed), _CHUNK)]
        for number, chunk in enumerate(chunks[1:], 1):
            self._store.set(f"{key}/{number}", chunk)
        head = b"%d %d\n" % (len(chunks), is_packed)
        self._store.set(key, head + (chunks[0] if chunks else b""))

    def _take(self, key: str) -> bytes:
        head, _, packed = bytes(self._store.get(key)).partition(b"\n")
        chunks, is_packed = map(int, head.split())
        parts = [packed, *(self._store.get(f"{key}/{number}") for number in range(1, chunks))]
        joined = b"".join(parts)
        return zlib.decompress(joined) if is_packed else joined

    def _forget(self, key: str) -> None:
        chunks = int(bytes(self._store.get(key)).split(b" ", 1)[0])
        with suppress(RuntimeError, NotImplementedError):  # not every store can
            for number in range(1, chunks):
                self._store.delete_key(f"{key}/{number}")
            self._store.set(key, b"0 0\n")

    # -- on the caller's ---------------------------------------------------------------------------

    def _ask(self, request: Callable[[], T], patience: float | None = None) -> T:
        """Have the board's thread do something with the store.

        Raises:
            DistributedError: the store is gone, or does not answer.
        """
        future: Future[T] = Future()
        self._requests.put((request, future))
        patience = self.timeout if patience is None else patience
        asked = time.monotonic()
        while True:
            try:
                return future.result(timeout=0.1)
            except TimeoutError:
                if self._lost is not None:
                    raise self._gone() from None
                self._require_answers(max(self._spoke, asked), patience)
            except Exception as error:
                self._lost = error
                raise self._gone() from error

    def _require_answers(self, since: float, patience: float) -> None:
        """Raise if the store has not answered for too long."""
        quiet = time.monotonic() - since
        if quiet > patience:
            self._lost = TimeoutError(f"has not answered for {quiet:.1f} s")
            raise self._gone()

    def _gone(self) -> DistributedError:
        """The error that there is no store to talk through, and whose process took it along."""
        silent = isinstance(self._lost, TimeoutError)
        what = str(self._lost) if silent else "is gone"
        store = f"the store that the {self.size} ranks talk through {what}"
        for rank, pid in self.pids.items():
            if (state := state_of(pid)) in ("ended", "stopped"):
                told = "has ended" if state == "ended" else "is stopped"
                error = DistributedError(f"{self.names[rank]}: its process {told}; {store}")
                error.rank = rank
                break
        else:
            holder = "the process that holds it (often rank 0's)"
            told = "is stopped or cannot be reached" if silent else "has ended"
            error = DistributedError(f"{store}: {holder} {told}")
        error.__cause__ = self._lost
        return error

    def _not_there(self, what: str, seconds: float) -> DistributedError:
        """The error about ranks that did not come."""
        keys = {rank: f"{what}/{rank}" for rank in range(self.size)}
        absent = [
            rank for rank, key in keys.items() if not self._ask(partial(self._store.check, [key]))
        ]
        names = " and ".join(self.names[rank] for rank in absent) or "a rank"
        return DistributedError(
            f"{names} did not come to the load within {seconds:.1f} s of {self.names[self.rank]}",
            detail={"ranks": absent, "seconds": seconds},
            hint="every rank of the process group has to load; rank_timeout says how long "
            "they wait",
        )
