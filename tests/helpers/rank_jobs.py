"""What ranks do in tests of the launcher: importable, so that their processes find it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from loadkit import ModelRegistry
from loadkit.errors import FormatError, LoadkitError
from loadkit.rank_worker import Rank

__all__ = ["Unpicklable", "fail_on", "job"]


class Unpicklable(FormatError):
    """An error that pickles and does not unpickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_refuse, ())


def _refuse() -> None:
    raise RuntimeError("this is no error to rebuild")


def job(rank: Rank, **arguments: Any) -> dict[str, Any]:
    """Where this rank stands, as the process sees it."""
    rank.say(("pid", os.getpid()))
    total = torch.tensor([1.0 + rank.parallel.rank])
    dist.all_reduce(total)
    return {
        "rank": rank.parallel.rank,
        "sum": total.item(),
        "pid": os.getpid(),
        "group": os.getpgrp(),
        "threads": torch.get_num_threads(),
        "stdin": os.fstat(0).st_rdev,
        "registered": "RankToyForCausalLM" in ModelRegistry.get_supported_archs(),
        "environment": sorted(set(os.environ) & {"RANK", "WORLD_SIZE", "LOCAL_RANK"}),
        **arguments,
    }


def fail_on(rank: Rank, *, who: int, how: str) -> int:
    """Rank ``who`` does ``how``; the others wait for it in a collective operation."""
    rank.say(("pid", os.getpid()))
    me = rank.parallel.rank
    if me == who:
        _FAILURES[how]()
    dist.all_reduce(torch.ones(1))
    return me


def _typed() -> None:
    try:
        int("x")
    except ValueError as error:
        raise FormatError("a header is torn", code="E_HEADER", file="m.st", offset=8) from error


def _untyped() -> None:
    raise KeyError("layers.3")


def _unpicklable() -> None:
    raise Unpicklable("it says this much", code="E_NAME", tensor="t", detail=object())


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _crashes() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _leaves() -> None:
    sys.stderr.write("so long\n")
    sys.stderr.flush()
    os._exit(0)


def _exits() -> None:
    sys.exit("enough")


def _sleeps() -> None:
    time.sleep(600)


def _grandchild() -> None:
    child = subprocess.Popen(["sleep", "600"])
    raise LoadkitError("it started a process", detail={"pid": child.pid})


_FAILURES = {
    name[1:]: function
    for name, function in list(globals().items())
    if name.startswith("_") and getattr(function, "__module__", "") == __name__
}
