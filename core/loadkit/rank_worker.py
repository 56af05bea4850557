"""One rank's process: it joins the others, runs one function, and says how that went.

``loadkit.launch`` starts it with a descriptor; everything it has to know comes through that. No
environment variable says which rank this is.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from loadkit.parallel_config import ParallelConfig
from loadkit.rank_channel import Channel
from loadkit.rank_failures import describe
from loadkit.rank_pulse import Pulse

__all__ = ["BOOT", "PULSES", "Rank", "Task", "main"]

PULSES = "ranks"  # where in the parent's store signs of life are

# What a new process runs: its import path is the parent's, before anything else is imported.
BOOT = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from loadkit.rank_worker import main; main(int(sys.argv[1]))"
)


@dataclass(frozen=True)
class Task:
    """What a rank has to do.

    Attributes:
        function: ``module:function``; called with a ``Rank`` and ``arguments``.
        port: of the parent's store, on this machine.
        registrations: what the parent registered in the five tables.
        log_level: records below it are not sent.
        beat_seconds: between two signs of life.
        collective_seconds: how long this rank waits for the others in one collective operation.
    """

    function: str
    arguments: Mapping[str, Any]
    parallel: ParallelConfig
    device: str
    threads: int
    port: int
    registrations: Mapping[str, Mapping[str, str]]
    log_level: int
    beat_seconds: float
    collective_seconds: float


class Rank:
    """What a rank's function gets: where it stands, and a way to say something.

    Attributes:
        parallel: its place in the layout.
        device: its own device, ``cuda:1``.
        threads: how many CPU threads are its share of the machine.
        process_group: of all ranks, in rank order: what ``loadkit.load`` takes.
    """

    def __init__(self, task: Task, channel: Channel, process_group: Any) -> None:
        self.parallel = task.parallel
        self.device = task.device
        self.threads = task.threads
        self.process_group = process_group
        self._channel = channel

    def say(self, message: object) -> None:
        """Send something to whoever started the ranks, while the function goes on."""
        self._channel.send(("said", message))


def main(descriptor: int) -> None:
    """Run one rank to its end; never returns."""
    os.set_inheritable(descriptor, False)
    _die_with_parent()
    faulthandler.enable()  # a crash says where, into the captured output
    channel = Channel(socket.socket(fileno=descriptor))
    code = 1
    with suppress(EOFError, OSError):  # the parent is gone: there is nobody to tell
        code = _run(channel, channel.receive())
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # threads and exit handlers of other code do not matter any more


def _run(channel: Channel, task: Task) -> int:
    released = threading.Event()
    threading.Thread(target=_watch, args=(channel, released), daemon=True).start()
    try:
        from loadkit import tables
        from loadkit.plugin_guard import import_value

        _send_logs(channel, task.log_level)
        tables.import_registrations(task.registrations)
        with _process_group(task) as process_group:
            channel.send(("ready",))
            function: Any = import_value(task.function)
            rank = Rank(task, channel, process_group)
            channel.send(("done", function(rank, **task.arguments)))
            released.wait()  # no rank leaves while another still talks to it
    except BaseException as error:  # noqa: BLE001 - whatever ends a rank is what has to be told
        channel.send(("failed", describe(error, task.parallel.rank)))
        return 1
    return 0


@contextmanager
def _process_group(task: Task) -> Iterator[Any]:
    """This rank among the others: the default group, and those of its layout."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(task.threads)
    backend = "gloo"
    if torch.device(task.device).type == "cuda":
        torch.cuda.set_device(task.device)
        backend = "cpu:gloo,cuda:nccl"
    here = ("127.0.0.1", task.port)
    pulses = dist.PrefixStore(PULSES, dist.TCPStore(*here, is_master=False))  # type: ignore[attr-defined]
    Pulse(pulses, task.parallel.rank, task.beat_seconds).start()
    dist.init_process_group(
        backend,
        store=dist.TCPStore(*here, is_master=False),  # type: ignore[attr-defined]
        rank=task.parallel.rank,
        world_size=task.parallel.world_size,
        timeout=timedelta(seconds=task.collective_seconds),
    )
    yield dist.group.WORLD
    dist.destroy_process_group()  # not after an error: that would wait for the others


def _watch(channel: Channel, released: threading.Event) -> None:
    """Wait for the parent's word to leave; when the parent is gone, so is everything here."""
    try:
        channel.receive()
        released.set()
    except (EOFError, OSError):
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)


def _die_with_parent() -> None:
    """Ask the system to kill this process when its parent dies; Linux only, others watch."""
    if sys.platform != "linux":
        return
    import ctypes

    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


class _Sender(logging.Handler):
    """Log records go to the parent, which shows them as its own."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            self._channel.send(("log", record.levelno, record.getMessage()))


def _send_logs(channel: Channel, level: int) -> None:
    logger = logging.getLogger("loadkit")
    logger.addHandler(_Sender(channel))
    logger.setLevel(level)
    logger.propagate = False
