"""Ranks as anybody starts them: plain processes with a process group, looked after by nobody.

They stay up and run one job after the other, since starting them costs far more than most jobs. A
job may end its process; who is left tells how that went.
"""

from __future__ import annotations

import importlib
import os
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing

__all__ = ["PerRank", "PlainRanks"]


class PlainRanks:
    """Started by the first ``run``; ``close`` ends them. The starter has the store, or rank 0."""

    def __init__(
        self,
        size: int = 4,
        *,
        own_store: bool = True,
        mounts: Mapping[int, tuple[Path, Path]] | None = None,
    ) -> None:
        self.size = size
        self._mounts = mounts or {}  # rank -> a file that lies over another one for it alone
        self._folder = tempfile.TemporaryDirectory()
        self._own_store = own_store
        self._processes: list[multiprocessing.Process] = []
        self._pipes: list[Connection] = []
        self._store: Any = None

    @property
    def pids(self) -> list[int]:
        """The processes, in rank order."""
        return [process.pid or 0 for process in self._processes]

    def start(self) -> None:
        """Start them, if they are not up."""
        if self._processes:
            return
        probe = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        port = probe.port
        if self._own_store:
            self._store = probe
        else:
            del probe
        context = multiprocessing.get_context("spawn")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank, args=(rank, self.size, theirs, port, not self._own_store), daemon=True
            )
            context.set_executable(self._python_of(rank))
            process.start()
            context.set_executable(sys.executable)
            theirs.close()  # so that the end of the process is the end of the pipe
            self._processes.append(process)
            self._pipes.append(ours)

    def run(
        self, job: str, *, gone: Sequence[int] = (), timeout: float = 120, **arguments: Any
    ) -> list[Any]:
        """Run ``module:function(rank, group, **arguments)`` on every rank; what each gives.

        Args:
            job: importable by the ranks.
            gone: ranks that will not answer: their place in the result is None.
            timeout: seconds for all to answer.
        """
        self.start()
        for rank, pipe in enumerate(self._pipes):
            values = {k: v[rank] if isinstance(v, PerRank) else v for k, v in arguments.items()}
            pipe.send((job, values))
        found: list[Any] = [None] * self.size
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in gone}
        until = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), max(0.0, until - time.monotonic()))
            if not ready:
                self.close()
                raise TimeoutError(f"ranks {sorted(waiting.values())} have not answered")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    good, found[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    good, found[rank] = False, "it is gone"
                if not good:
                    self.close()
                    raise RuntimeError(f"rank {rank}: {found[rank]}")
        return found

    def _python_of(self, rank: int) -> str:
        """What a rank runs: Python, in a world of its own where it has a mount."""
        if rank not in self._mounts:
            return sys.executable
        probe = subprocess.run(["unshare", "-Urm", "true"], check=False, capture_output=True)
        if probe.returncode:
            pytest.skip("user namespaces are refused here: unshare -Urm fails")
        over, under = map(shlex.quote, map(str, self._mounts[rank]))
        inner = f'mount --bind {over} {under} && exec {shlex.quote(sys.executable)} "$@"'
        script = Path(self._folder.name) / f"rank{rank}"
        script.write_text(f'#!/bin/sh\nexec unshare -Urm sh -c {shlex.quote(inner)} sh "$@"\n')
        script.chmod(0o755)
        return str(script)

    def close(self) -> None:
        """End the ranks, stopped ones too."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes, self._store = [], [], None
        self._folder.cleanup()


class PerRank(list[Any]):
    """An argument of ``run`` that is another one for each rank."""


def _rank(rank: int, size: int, orders: Connection, port: int, holds_store: bool) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, is_master=holds_store and rank == 0, wait_for_workers=False
    )
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    while True:
        try:
            job, arguments = orders.recv()
        except EOFError:
            os._exit(0)
        module, _, name = job.partition(":")
        try:
            function = getattr(importlib.import_module(module), name)
            answer = True, function(rank, dist.group.WORLD, **arguments)
        except Exception:
            answer = False, traceback.format_exc()
        orders.send(answer)
