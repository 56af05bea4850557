"""Ranks as processes of this machine: start them, wait for all, and leave none behind.

Each rank is one process in a process group of its own. It gets everything it needs over a socket,
joins the others through a store that this process holds, and runs one function. When a rank fails,
dies or falls silent, the others are stopped and the one cause is raised.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadkit import tables
from loadkit.errors import DistributedError, OptionError
from loadkit.parallel_config import ParallelConfig
from loadkit.rank_channel import fill_standard_descriptors
from loadkit.rank_failures import Failure, name_of, root_cause
from loadkit.rank_process import RankProcess
from loadkit.rank_pulse import Watch, beat_seconds
from loadkit.rank_worker import PULSES, Task

__all__ = ["Patience", "run_ranks"]

log = logging.getLogger("loadkit")

_TICK = 0.1  # seconds between two looks at the ranks
_SETTLING = 0.3  # seconds for the cause to arrive after a failure that stands for itself
_SETTLING_INDIRECT = 2.0  # and after one that only says that another rank is gone


@dataclass(frozen=True)
class Patience:
    """How long ranks are waited for, in seconds.

    Attributes:
        start: until a rank has imported what it needs and joined the others.
        silence: without a sign of life; a stopped or frozen process gives none.
        collective: that a rank waits for the others in one collective operation.
    """

    start: float = 300.0
    silence: float = 60.0
    collective: float = 600.0


def run_ranks(
    function: str,
    arguments: Mapping[str, Any],
    world: Sequence[ParallelConfig],
    *,
    device: str = "cpu",
    patience: Patience | None = None,
    on_message: Callable[[int, Any], None] | None = None,
) -> list[Any]:
    """Call a function in one new process per rank; give what each returned, in rank order.

    Call it from a thread that lives as long as the call. Registrations of this process that have
    the form ``module:Class`` are repeated in the ranks.

    Args:
        function: ``module:function``, importable; called as ``function(rank, **arguments)`` with a
            ``loadkit.rank_worker.Rank``. What it takes and gives is pickled.
        arguments: its keyword arguments, the same for every rank.
        world: every rank's place, in rank order.
        device: ``cpu`` (gloo), or ``cuda`` (nccl; rank r takes device r).
        patience: how long to wait for what.
        on_message: called with a rank and what it passed to ``Rank.say``.

    Raises:
        LoadkitError: what a rank raised, its rank named.
        DistributedError: a rank raised something else, died, fell silent, or kept others waiting.
        OptionError: there are fewer devices than ranks.
    """
    patience = patience or Patience()
    devices = _devices(device, len(world))
    if lost := tables.bound_here():
        log.warning(
            "the ranks will not have %s: registered as a class that only this process has; "
            'register "module:Class"',
            ", ".join(lost),
        )
    fill_standard_descriptors()
    store = _store()
    shared = {
        "function": function,
        "arguments": dict(arguments),
        "threads": _threads(len(world)),
        "port": store.port,
        "registrations": tables.export_registrations(),
        "log_level": log.getEffectiveLevel(),
        "beat_seconds": beat_seconds(patience.silence),
        "collective_seconds": patience.collective,
    }
    tasks = [
        Task(parallel=parallel, device=where, **shared)
        for parallel, where in zip(world, devices, strict=True)
    ]
    ranks: list[RankProcess] = []
    try:
        for task in tasks:
            ranks.append(RankProcess(task))  # noqa: PERF401 - each is known once it runs
        for rank in ranks:
            rank.give_task(patience.start)
        return _Supervisor(ranks, patience, _watch(store, patience), on_message).run()
    finally:
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.reap()


class _Supervisor:
    """Waits until every rank has a result, or one has failed."""

    def __init__(
        self,
        ranks: Sequence[RankProcess],
        patience: Patience,
        watch: Watch,
        on_message: Callable[[int, Any], None] | None,
    ) -> None:
        self._ranks = ranks
        self._patience = patience
        self._watch = watch
        self._on_message = on_message
        self._told: set[str] = set()

    def run(self) -> list[Any]:
        """Every rank's result.

        Raises:
            LoadkitError: the cause of the first failure.
        """
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                selector.register(rank.channel, selectors.EVENT_READ, rank)
            while not all(rank.settled for rank in self._ranks):
                before = time.monotonic()
                for key, _ in selector.select(_TICK):
                    self._take(key.data)
                    if key.data.channel.ended:
                        selector.unregister(key.fileobj)
                self._forgive(time.monotonic() - before - _TICK)
                self._look()
                self._raise_if_failed()
        for rank in self._ranks:
            rank.release()
        for rank in self._ranks:
            rank.wait()
        return [rank.result for rank in self._ranks]

    def _take(self, rank: RankProcess) -> None:
        """Act on what a rank sent."""
        try:
            messages = rank.messages()
        except Exception as error:  # noqa: BLE001 - what unpickling another's values may raise
            unread = DistributedError(
                f"what it sent cannot be read: {type(error).__name__}: {error}"
            )
            unread.__cause__ = error
            rank.settled, rank.failure = True, Failure(rank.number, unread)
            return
        for kind, *values in messages:
            if kind == "ready":
                rank.started = True
                self._watch.add([rank.number])
            elif kind == "said":
                if self._on_message is not None:
                    self._on_message(rank.number, values[0])
            elif kind == "log":
                self._tell(rank, *values)
            elif kind == "done":
                rank.settled, rank.result = True, values[0]
            elif kind == "failed":
                rank.settled, rank.failure = True, values[0]

    def _tell(self, rank: RankProcess, level: int, message: str) -> None:
        """A rank's log record as our own; what several ranks say is told once."""
        if message not in self._told:
            self._told.add(message)
            log.log(level, "%s: %s", name_of(rank.task.parallel), message)

    def _look(self) -> None:
        """Find ranks that ended, or fell silent."""
        silence = self._watch.look()
        for rank in self._ranks:
            if rank.settled:
                continue
            rank.failure = rank.look(self._patience.start)
            if rank.failure is None and silence is not None and silence.rank == rank.number:
                rank.failure = rank.silent(silence.seconds)
            rank.settled = rank.failure is not None

    def _forgive(self, seconds: float) -> None:
        """A time in which this process itself stood still is no rank's delay."""
        if seconds > 0:
            for rank in self._ranks:
                rank.born += seconds

    def _raise_if_failed(self) -> None:
        """Raise the cause, once it had time to arrive."""
        failures = [rank.failure for rank in self._ranks if rank.failure is not None]
        if not failures:
            return
        unsettled = [rank.number for rank in self._ranks if not rank.settled]
        first = min(failure.when for failure in failures)
        indirect = all(failure.indirect for failure in failures)
        settling = _SETTLING_INDIRECT if indirect else _SETTLING
        if unsettled and time.monotonic() - first < settling:
            return
        names = [name_of(rank.task.parallel) for rank in self._ranks]
        raise root_cause(failures, unsettled, names)


def _devices(device: str, ranks: int) -> list[str]:
    """Each rank's device.

    Raises:
        OptionError: fewer devices than ranks, or one device named for several ranks.
    """
    if device == "cpu":
        return ["cpu"] * ranks
    kind, _, index = device.partition(":")
    if kind != "cuda" or (index and ranks > 1):
        raise OptionError(
            f"{ranks} ranks cannot run on device {device!r}", hint="give 'cpu' or 'cuda'"
        )
    if index:
        return [device]
    import torch

    if torch.cuda.device_count() < ranks:
        raise OptionError(
            f"{ranks} ranks need {ranks} CUDA devices; there are {torch.cuda.device_count()}",
            detail={"ranks": ranks, "devices": torch.cuda.device_count()},
        )
    return [f"cuda:{rank}" for rank in range(ranks)]


def _store() -> Any:
    """A store on this machine's loopback that no rank takes along when it ends."""
    import torch.distributed as dist

    if not dist.is_available():
        raise DistributedError("this build of torch has no torch.distributed")
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    port = listening.getsockname()[1]
    return dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def _watch(store: Any, patience: Patience) -> Watch:
    """Sees whether the ranks live, by what they count in the store."""
    import torch.distributed as dist

    return Watch(dist.PrefixStore(PULSES, store), patience.silence)  # type: ignore[attr-defined]


def _threads(ranks: int) -> int:
    """A rank's share of the CPUs that this process may use, or less where the user says so."""
    usable = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        usable = len(os.sched_getaffinity(0))
    share = max(1, usable // ranks)
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return min(share, int(asked)) if asked.isdecimal() and int(asked) else share
