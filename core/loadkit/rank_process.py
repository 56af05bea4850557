"""One rank's process as its parent sees it: started, heard, looked after, and killed."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from typing import Any

from loadkit.rank_channel import Channel, socket_pair
from loadkit.rank_failures import Failure, ended, silent
from loadkit.rank_worker import BOOT, Task

__all__ = ["RankProcess"]

log = logging.getLogger("loadkit")

_REAPING = 5.0  # seconds for a process to end after it was told to
_OUTPUT = 4_000  # bytes of a rank's output that are kept for its error


class RankProcess:
    """One rank's process as the parent sees it."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.number = task.parallel.rank
        self.started = False  # it has joined the others
        self.settled = False  # it has given a result or a failure
        self.result: Any = None
        self.failure: Failure | None = None
        self.born = time.monotonic()
        self._gone: float | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by reap
        ours, theirs = socket_pair()
        self.channel = Channel(ours)
        self._socket = ours
        threads = str(task.threads)
        environment = {"GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"}
        environment |= os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        environment["LOCAL_WORLD_SIZE"] = str(task.parallel.world_size)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOT, str(theirs.fileno()), *sys.path],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                process_group=0,  # a terminal's Ctrl-C is the parent's alone
                env=environment,
            )

    def give_task(self, timeout: float) -> None:
        """Send the task. A process that is dead already is found by ``look``."""
        self._socket.settimeout(timeout)
        with suppress(BrokenPipeError, ConnectionResetError, TimeoutError):
            self.channel.send(self.task)
        self._socket.settimeout(None)

    def release(self) -> None:
        """Let it leave."""
        with suppress(OSError):
            self.channel.send("leave")

    def messages(self) -> list[Any]:
        """What it has sent."""
        return self.channel.arrived()

    def look(self, limit: float) -> Failure | None:
        """What is wrong with the process: it ended, or did not join for ``limit`` seconds."""
        now = time.monotonic()
        if self.channel.ended:
            self._gone = self._gone or now
            code = self._process.poll()
            if code is None and now - self._gone < _REAPING:
                return None
            return ended(self.number, code, self._tail(), started=self.started)
        if not self.started and now - self.born > limit:
            return self.silent(now - self.born)
        return None

    def silent(self, seconds: float) -> Failure:
        """That it has given no sign of life for some time."""
        return silent(self.number, seconds, self._process.pid, started=self.started)

    def kill(self) -> None:
        """Kill it and every process it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self) -> bool:
        """Wait some seconds for its end; whether it came."""
        try:
            self._process.wait(_REAPING)
        except subprocess.TimeoutExpired:
            return False
        return True

    def reap(self) -> None:
        """Take its end, once it is killed, and let go of what it held here."""
        if not self.wait():
            log.warning("process %d of a rank does not end", self._process.pid)
        self.channel.close()
        self._output.close()

    def _tail(self) -> str:
        """The end of what it wrote."""
        end = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, end - _OUTPUT))
        return self._output.read().decode(errors="replace")
