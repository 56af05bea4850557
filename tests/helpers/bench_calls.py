"""What fresh processes are asked to do by the tests of measuring."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from loadkit.errors import ReadError


def count(to: int) -> Callable[[], dict[str, int]]:
    """Give a figure of its own."""
    return lambda: {"counted": to}


def typed() -> Callable[[], Any]:
    """Fail with a typed error."""

    def go() -> None:
        raise ReadError("the disk is gone", errno=5, file="a.bin", hint="plug it in")

    return go


def killed() -> Callable[[], Any]:
    """End as the system ends a process that has taken all memory."""
    return lambda: os.kill(os.getpid(), signal.SIGKILL)


def slow() -> Callable[[], Any]:
    """Take long."""
    return lambda: time.sleep(60)
