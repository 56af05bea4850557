"""What plain ranks do in tests of loads over several of them: importable, so that they find it."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import loadkit
from helpers.cold import disk_bytes
from loadkit import rank_shares
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.errors import LoadkitError, ReadError
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
    except (LoadkitError, KeyboardInterrupt) as error:
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


def _told(error: LoadkitError | KeyboardInterrupt) -> dict[str, Any]:
    if isinstance(error, KeyboardInterrupt):
        return {"type": "KeyboardInterrupt", "rank": None}
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


def _raise_io() -> None:
    where = {"file": "model.safetensors", "tensor": "model.norm.weight", "offset": 4711}
    raise ReadError("the disk is on strike", errno=5, **where)


_FAILURES: dict[str, Callable[[], None]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crashes": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "memory": _raise_memory,
    "io": _raise_io,
    "interrupted": lambda: signal.raise_signal(signal.SIGINT),
}


def load_as(rank: int, group: Any, *, source: Path, place: int) -> dict[str, Any]:
    """Load as another rank than this one is."""
    return load(place, group, source=source, sizes={"tp_size": 4})


def add_up(rank: int, group: Any) -> float:
    """What the ranks' own group still does."""
    total = torch.ones(1)
    torch.distributed.all_reduce(total, group=group)
    return total.item()


class _Plain(torch.nn.Module):
    """Some of a Llama's tensors, by their own names."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            at: torch.nn.Module = self
            *path, leaf = name.split(".")
            for part in path:
                if not hasattr(at, part):
                    at.add_module(part, torch.nn.Module())
                at = getattr(at, part)
            at.register_parameter(leaf, torch.nn.Parameter(torch.zeros(shape)))


def load_into(rank: int, group: Any, *, source: Path, load_config: LoadConfig) -> dict[str, Any]:
    """Fill a plain module in place, all ranks the same."""
    tensors = dict(loadkit.iter_weights(source))
    module = _Plain({name: tuple(tensor.size()) for name, tensor in tensors.items()})
    before = {name: parameter.data_ptr() for name, parameter in module.named_parameters()}
    result = loadkit.load_into(module, source, load_config=load_config, process_group=group)
    good = all(
        torch.equal(parameter, tensors[name]) and parameter.data_ptr() == before[name]
        for name, parameter in module.named_parameters()
    )
    return {"good": good, "bytes_read": result.report.bytes_read}


def load_in_rank(rank: Any, *, source: str, who: int) -> None:
    """A failing load in a rank that loadkit started."""
    config = LoadConfig(alias="never", reader="pread")
    place = rank.parallel.rank
    if place == who:

        def fail(*_: Any) -> int:
            _raise_io()
            return 0

        PreadReader.read = fail  # type: ignore[method-assign]
    loadkit.load(
        source, parallel=rank.parallel, load_config=config, process_group=rank.process_group
    )


def load_cold(
    rank: int, group: Any, *, source: Path, sizes: dict[str, int], load_config: LoadConfig
) -> dict[str, Any]:
    """Load and touch everything; what that took from the disk and of memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(
        ctypes.c_size_t(0)
    )  # what a load before has left to be used again
    before = disk_bytes()
    result = loadkit.load(
        source,
        parallel=place_of(rank, sizes),
        load_config=load_config,
        process_group=group,
    )
    for parameter in result.model.parameters():
        parameter.detach().view(-1).view(torch.uint8)[::4096].sum()
    report, plan = result.report, result.plan
    taken = disk_bytes() - before
    del result, parameter  # a model holds cycles, and this one may hold the file's pages
    gc.collect()
    return {
        "disk_bytes": taken,
        "anonymous_bytes": report.peak["host_anonymous_bytes"],
        "parameter_bytes": report.parameter_bytes,
        "bytes_read": report.bytes_read,
        "group": plan.group_bytes_to_read,
        "seconds": report.seconds,
        "predicted": plan.predicted_peak_bytes,
    }
