"""Which of several ranks' failures is the cause, and how it is told: one typed error.

When one rank fails, the others fail too, because their talk with it breaks off. Theirs are
indirect; what is told is the first that is not.
"""

from __future__ import annotations

import errno
import pickle
import signal
import time
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadkit import errors
from loadkit.errors import DistributedError, LoadkitError, ReadError, ResourceError
from loadkit.parallel_config import ParallelConfig
from loadkit.text import printable

__all__ = [
    "Failure",
    "broke_off",
    "describe",
    "ended",
    "name_of",
    "root_cause",
    "silent",
    "state_of",
]

_BACKENDS = ("gloo", "nccl")  # their errors name their files


@dataclass(frozen=True)
class Failure:
    """One rank's end.

    Attributes:
        error: typed; pickles.
        indirect: it only says that another rank could not be reached.
        waited: it waited for another rank until the time was up.
        when: on the system's monotonic clock, which all processes share.
    """

    rank: int
    error: LoadkitError
    indirect: bool = False
    waited: bool = False
    when: float = field(default_factory=time.monotonic)


def describe(error: BaseException, rank: int) -> Failure:
    """An exception of a rank as something that travels: its type if it is ours, with its cause."""
    indirect = _is_indirect(error)
    waited = indirect and any(word in str(error).lower() for word in ("timed out", "timeout"))
    typed = _portable(_typed(error))
    lines = "".join(traceback.format_exception(error))
    typed.add_note(f"in rank {rank}:\n{lines}")
    return Failure(rank, typed, indirect, waited)


def ended(rank: int, code: int | None, output: str, *, started: bool) -> Failure:
    """A rank whose process ended before it gave a result.

    Args:
        rank: which.
        code: its exit code, minus the number of the signal that ended it; None: unknown.
        output: the end of what it wrote.
        started: whether it had joined the others.
    """
    hint = None
    if code is None:
        how = "closed its connection"
    elif code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        how = f"was killed by {name}"
        if name == "SIGKILL":
            hint = "the system kills so when memory runs out; its log says"
    else:
        how = f"ended with exit code {code}"
    when = "before it gave a result" if started else "before it had joined the others"
    error = DistributedError(
        f"its process {how} {when}{_said(output)}",
        detail={"exit_code": code, "output": output},
        hint=hint,
    )
    return Failure(rank, error)


def silent(rank: int, seconds: float, pid: int | None, *, started: bool) -> Failure:
    """A rank that has given no sign of life for some time; ``pid`` where it is known here."""
    state = None if pid is None else state_of(pid)
    what = "gave no sign of life" if started else "did not join the others"
    error = DistributedError(
        f"its process {what} for {seconds:.1f} s{_told(state)}",
        detail={"seconds": seconds, "state": state},
    )
    return Failure(rank, error)


def root_cause(
    failures: Iterable[Failure], unsettled: Sequence[int], names: Sequence[str]
) -> LoadkitError:
    """The one error to raise: the earliest that stands for itself; it names its rank.

    Args:
        failures: at least one.
        unsettled: ranks that neither failed nor finished.
        names: what every rank is called.
    """
    ordered = sorted(failures, key=lambda failure: (failure.indirect, failure.when))
    first = ordered[0]
    if first.waited and unsettled:
        others = " and ".join(names[rank] for rank in unsettled)
        error: LoadkitError = DistributedError(
            f"{others} kept {names[first.rank]} waiting until the time was up",
            detail={"ranks": list(unsettled)},
        )
        error.__cause__ = first.error
        return error
    error = first.error
    if error.rank is None:  # else the ranks agreed on it among themselves
        error.rank = first.rank
        error.message = f"{names[first.rank]}: {error.message}"
        error.args = (error.message,)
    return error


def name_of(parallel: ParallelConfig) -> str:
    """``rank 1 of 2``; where there are several axes, the place on each of them too."""
    axes = [axis for axis in ("dp", "pp", "tp") if getattr(parallel, f"{axis}_size") > 1]
    place = ", ".join(f"{axis} {getattr(parallel, f'{axis}_rank')}" for axis in axes)
    name = f"rank {parallel.rank} of {parallel.world_size}"
    return f"{name} ({place})" if len(axes) > 1 else name


def _said(output: str) -> str:
    """The telling line of what a dead process wrote: where it crashed, or else the last."""
    lines = output.strip().splitlines()
    if not lines:
        return ""
    at = next((n for n, line in enumerate(lines) if line.startswith("Current thread")), None)
    where = next((line.strip() for line in lines[at:] if line.startswith('  File "')), None)
    crashed = at is not None and where
    return f"; at {printable(where)}" if crashed else f"; it said: {printable(lines[-1])}"


def _is_indirect(error: BaseException) -> bool:
    """Whether an error is about reaching the other ranks."""
    seen: BaseException | None = error
    while seen is not None:
        module = type(seen).__module__
        if isinstance(seen, LoadkitError) and not isinstance(seen, DistributedError):
            return False
        if module.startswith("torch") and type(seen).__name__.startswith("Dist"):
            return True
        text = str(seen).lower()
        if isinstance(seen, RuntimeError) and any(word in text for word in _BACKENDS):
            return True
        seen = seen.__cause__
    return False


def _typed(error: BaseException) -> LoadkitError:
    """The error if it is one of loadkit's own, else what stands for it, the error its cause."""
    if isinstance(error, LoadkitError):
        return error
    text = f"{type(error).__name__}: {error}"
    made: LoadkitError
    if isinstance(error, MemoryError):
        made = ResourceError(f"out of memory: {error}" if str(error) else "out of memory")
    elif isinstance(error, OSError) and error.errno not in (None, errno.EPIPE):
        made = ReadError(str(error), errno=error.errno, file=error.filename)
    else:
        made = DistributedError(text)
    made.__cause__ = error
    return made


def _portable(error: LoadkitError) -> LoadkitError:
    """The error, or as much of it as another process can unpickle."""
    if _travels(error):
        return error
    cause = error.__cause__
    if cause is not None:
        error.__cause__ = RuntimeError(f"{type(cause).__name__}: {cause}")
        if _travels(error):
            return error
    bases = (cls for cls in type(error).__mro__ if cls.__module__ == errors.__name__)
    plain: LoadkitError = next(bases)(error.message, code=error.code, hint=error.hint)
    for name in ("file", "tensor", "offset", "parameter", "detail"):
        value: Any = getattr(error, name)
        setattr(plain, name, value if isinstance(value, str | int | None) else repr(value))
    plain.__cause__ = error.__cause__
    return plain


def _travels(error: LoadkitError) -> bool:
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301, TID251 - what was pickled just here
    except Exception:  # noqa: BLE001 - whatever a class's own pickling raises
        return False
    return True


def broke_off(rank: int, message: str, pid: int | None) -> Failure:
    """A rank that a connection to broke off; ``pid`` where it is known here."""
    state = None if pid is None else state_of(pid)
    ended = _told(state) if state == "ended" else ""
    return Failure(rank, DistributedError(f"{message}{ended}"), indirect=True)


def _told(state: str | None) -> str:
    """A process's state as the end of a sentence."""
    if state is None:
        return ""
    return "; it has ended" if state == "ended" else f"; it is {state}"


def state_of(pid: int) -> str | None:
    """What a process does, where the system tells: ``stopped``, ``ended``, ``running``."""
    names = {"T": "stopped", "t": "traced", "D": "waiting for a disk", "Z": "ended", "R": "running"}
    if not Path("/proc/self").exists():
        return None
    with suppress(OSError, IndexError, ValueError):
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:  # noqa: PTH123
            return names.get(file.read().rpartition(")")[2].split()[0])
    return "ended"
