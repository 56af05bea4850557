"""What plain ranks do in tests of loads over several of them: importable, so that they find it."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import loadkit
from loadkit import rank_shares
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.errors import LoadkitError
from loadkit.readers.pread import PreadReader

__all__ = ["contents", "load", "load_and_fail", "place_of"]


def place_of(rank: int, sizes: dict[str, int]) -> ParallelConfig:
    """A rank's place in a layout."""
    return ParallelConfig.for_rank(rank, **sizes)


def contents(model: torch.nn.Module) -> dict[str, str]:
    """A digest of every parameter and buffer."""
    found = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        found[name] = f"{tensor.dtype} {list(tensor.size())} {hashlib.sha256(data).hexdigest()}"
    return found


def load(
    rank: int,
    group: Any,
    *,
    source: Path | str,
    sizes: dict[str, int],
    load_config: LoadConfig | None = None,
    round_bytes: int = 0,
    together: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Load this rank's part; what it holds and what it took, or how it failed."""
    usual = rank_shares.ROUND
    rank_shares.ROUND = round_bytes or usual
    before = threading.active_count()
    began = time.monotonic()
    try:
        result = loadkit.load(
            source,
            parallel=place_of(rank, sizes),
            load_config=load_config,
            process_group=group if together else None,
            **options,
        )
    except LoadkitError as error:
        return _told(error) | {
            "seconds": time.monotonic() - began,
            "threads": threading.active_count() - before,
        }
    finally:
        rank_shares.ROUND = usual
    return {
        "contents": contents(result.model),
        "planned": result.plan.bytes_to_read,
        "group": result.plan.group_bytes_to_read,
        "report": result.report.to_dict(),
        "seconds": time.monotonic() - began,
        "threads": threading.active_count() - before,
    }


def _told(error: LoadkitError) -> dict[str, Any]:
    return {
        "type": type(error).__name__,
        "rank": error.rank,
        "cause": type(error.__cause__).__name__,
        **error.to_dict(),
    }


def load_and_fail(
    rank: int, group: Any, *, who: int, how: str, at: int = 2, **arguments: Any
) -> dict[str, Any]:
    """The same, and in the middle of the ``at``-th read of rank ``who`` something happens."""
    if rank != who:
        return load(rank, group, **arguments)
    read = PreadReader.read
    count = 0

    def read_and_fail(self: PreadReader, extents: Any, landed: Any = None) -> int:
        nonlocal count
        count += 1
        if count == at:
            _FAILURES[how]()
        return read(self, extents, landed)

    PreadReader.read = read_and_fail  # type: ignore[method-assign]
    try:
        return load(rank, group, **arguments)
    finally:
        PreadReader.read = read  # type: ignore[method-assign]


def _raise_memory() -> None:
    raise MemoryError("no more")


_FAILURES: dict[str, Callable[[], None]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crashes": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "memory": _raise_memory,
}


def with_timeout(config: LoadConfig, seconds: float) -> LoadConfig:
    """The same, with a short patience."""
    return replace(config, rank_timeout=seconds)
