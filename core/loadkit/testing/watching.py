"""What a load leaves behind, and what it reads: files, threads, bytes."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Left", "bytes_asked_for", "landed_bytes", "left_behind"]

_PATIENCE = 5.0  # seconds that a thread on its way out is waited for


class Left:
    """What a block left: open files below a folder, and threads. Filled in when it ends."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.threads: list[str] = []


@contextmanager
def left_behind(folder: Path) -> Iterator[Left]:
    """Watch a block: what is open below ``folder`` or runs after it, and was not before."""
    left = Left()
    threads = set(threading.enumerate())
    files = set(_open_below(folder))
    yield left
    until = time.monotonic() + _PATIENCE
    while True:
        gc.collect()
        left.files = sorted(set(_open_below(folder)) - files)
        new = [one for one in threading.enumerate() if one not in threads]
        left.threads = sorted(one.name for one in new)
        if not (left.files or left.threads) or time.monotonic() > until:
            return
        time.sleep(0.05)


def _open_below(folder: Path) -> Iterator[str]:
    """``descriptor path`` of the files below a folder that are open; nothing without /proc."""
    root = os.path.realpath(folder)
    try:
        numbers = os.listdir("/proc/self/fd")  # noqa: PTH208
    except OSError:
        return
    for number in numbers:
        try:
            path = os.readlink(f"/proc/self/fd/{number}")  # noqa: PTH115
        except OSError:  # the listing's own
            continue
        if path.startswith(root):
            yield f"{number} {path}"


def bytes_asked_for() -> int | None:
    """Bytes that read calls of this process have got so far; None where that is not told."""
    try:
        for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines():
            if line.startswith("rchar:"):
                return int(line.split()[1])
    except (OSError, ValueError):
        return None
    return None


@contextmanager
def landed_bytes() -> Iterator[list[int]]:
    """Every number of bytes that the progress bar is told of inside the block."""
    from loadkit.progress import Progress

    told: list[int] = []
    real = Progress.landed

    def landed(self: Progress, nbytes: int) -> None:
        told.append(nbytes)
        real(self, nbytes)

    Progress.landed = landed  # type: ignore[method-assign]
    try:
        yield told
    finally:
        Progress.landed = real  # type: ignore[method-assign]
