"""What a start costs: CPU of a fresh interpreter with its imports, and of ``loadkit --help``."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["cli", "start"]

Go = Callable[[], Any]


def start(args: list[str]) -> Go:
    """CPU seconds (user and system) of ``python ARGS``, its own start included."""
    command = [sys.executable, *args]
    subprocess.run(command, check=True, capture_output=True)  # the file cache, and .pyc files

    def go() -> dict[str, float]:
        before = _children()
        subprocess.run(command, check=True, capture_output=True)
        return {"child_cpu_s": _children() - before}

    return go


def cli(args: list[str]) -> Go:
    """The same of the installed command ``loadkit ARGS``."""
    return start([str(Path(sys.executable).with_name("loadkit")), *args])


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
