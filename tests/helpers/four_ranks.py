"""Four gloo ranks that stay up: starting them costs far more than what a family asks of them."""

from __future__ import annotations

import os
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import multiprocessing

from helpers.families import Case, Tensors, layouts_of, run_case
from loadkit.config import ParallelConfig
from loadkit_layers.communication import init_parallel_groups

__all__ = ["FourRanks"]

WORLD = 4


class FourRanks:
    """Started by the first ``run``; ``close`` ends them."""

    def __init__(self) -> None:
        self._processes: list[multiprocessing.Process] = []
        self._pipes: list[Connection] = []

    def run(self, cases: dict[str, Case], folder: Path) -> dict[str, list[Tensors]]:
        """Each case at tp 2 (twice, side by side) and tp 4, then in its own layouts.

        Returns:
            ``"{case}/tp{n}"`` and ``"{case}/{layout}"`` to each rank's outputs.

        Raises:
            RuntimeError: a rank failed; says how. All of them are ended.
        """
        for name, case in cases.items():
            case.save(folder / name)
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send(folder)
        self._await()
        ranks = [load_file(folder / f"rank{rank}.st") for rank in range(WORLD)]
        results: dict[str, list[Tensors]] = {}
        for rank, tensors in enumerate(ranks):
            for key, value in tensors.items():
                place, _, output = key.rpartition("/")
                results.setdefault(place, [{} for _ in ranks])[rank][output] = value
        return results

    def close(self) -> None:
        """End the ranks."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.terminate()
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        # The parent holds the store, so that no rank that ends early takes it along.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        context = multiprocessing.get_context("spawn")
        for rank in range(WORLD):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank, args=(rank, theirs, self._store.port), daemon=True
            )
            process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
            self._processes.append(process)
            self._pipes.append(ours)

    def _await(self) -> None:
        """Until every rank is done, or the first of them fails."""
        waiting = list(self._pipes)
        while waiting:
            for pipe in wait(waiting):
                assert isinstance(pipe, Connection)
                try:
                    failure = pipe.recv()
                except EOFError:
                    failure = "it is gone"
                if failure:
                    rank = self._pipes.index(pipe)
                    self.close()
                    raise RuntimeError(f"rank {rank}: {failure}")
                waiting.remove(pipe)


def _rank(rank: int, orders: Connection, port: int) -> None:
    """One process: runs the cases of each folder it is sent, until there are no more."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    pairs = ParallelConfig(dp_size=2, dp_rank=rank // 2, tp_size=2, tp_rank=rank % 2)
    init_parallel_groups(pairs)
    while True:
        try:
            folder = orders.recv()
        except EOFError:
            return
        try:
            _run_all(folder, rank, [pairs, ParallelConfig(tp_size=WORLD, tp_rank=rank)])
            failure = ""
        except Exception:
            failure = traceback.format_exc()
        orders.send(failure)


def _run_all(folder: Path, rank: int, parallels: list[ParallelConfig]) -> None:
    """Every case of a folder in every way; the outputs are written beside them."""
    out: Tensors = {}
    for place in sorted(path for path in folder.iterdir() if path.is_dir()):
        layouts = {f"tp{parallel.tp_size}": parallel for parallel in parallels}
        for name, parallel in {**layouts, **layouts_of(place, rank)}.items():
            for key, value in run_case(place, parallel).items():
                out[f"{place.name}/{name}/{key}"] = value.clone()
    save_file(out, folder / f"rank{rank}.st")
