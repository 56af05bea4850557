"""The floor of a machine: the same files, read by plain calls and nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from loadkit.readers.extents import buffer_at
from loadkit.readers.threads import Task, run_tasks

__all__ = ["read_files"]

PIECE = 8 << 20  # bytes of one call


def read_files(paths: Sequence[str], memory: str = "reused", threads: int = 1) -> Callable[[], Any]:
    """Read whole files in order, with ``preadv``.

    Args:
        paths: local files.
        memory: where the bytes go. "reused": one small buffer per thread, over and over: the
            least that reading can cost. "fresh": memory of the files' size whose first touch
            counts, as in a load into memory of its own. "touched": the same, touched before.
        threads: how many read.
    """
    import torch

    sizes = [os.stat(path).st_size for path in paths]  # noqa: PTH116
    total = sum(sizes)
    before = {"reused": torch.ones(PIECE * threads, dtype=torch.uint8)}
    if memory == "touched":
        before["touched"] = torch.ones(total, dtype=torch.uint8)

    def go() -> list[torch.Tensor]:
        into = before[memory] if memory in before else torch.empty(total, dtype=torch.uint8)
        with ExitStack() as stack:
            descriptors = []
            for path in paths:
                descriptors.append(os.open(path, os.O_RDONLY))
                stack.callback(os.close, descriptors[-1])
            run_tasks(_tasks(descriptors, sizes, into, memory == "reused", threads), threads)
        return [into]

    return go


def _tasks(
    descriptors: Sequence[int], sizes: Sequence[int], into: Any, reused: bool, threads: int
) -> Iterator[Task]:
    start = piece = 0
    for descriptor, size in zip(descriptors, sizes, strict=True):
        for at in range(0, size, PIECE):
            count = min(PIECE, size - at)
            # two tasks may share a piece of the reused buffer: nobody looks at its bytes
            place = piece % threads * PIECE if reused else start + at
            yield partial(_read, descriptor, at, buffer_at(into.data_ptr() + place, count))
            piece += 1
        start += size


def _read(descriptor: int, offset: int, into: memoryview) -> int:
    done = 0
    while done < len(into):
        got = os.preadv(descriptor, [into[done:]], offset + done)
        if not got:
            raise OSError(f"a file ended at byte {offset + done}")
        done += got
    return done
