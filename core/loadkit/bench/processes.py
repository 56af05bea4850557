"""Measured runs in fresh processes, the page cache before them, and medians."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadkit.bench.measure import Figures
from loadkit.errors import LoadkitError, ResourceError

__all__ = ["ProcessError", "Run", "drop_from_cache", "machine", "medians", "run_fresh", "warm"]

_CHILD = "loadkit.bench.child"
_SAID = 300  # characters of what a process said last


@dataclass(frozen=True)
class Run:
    """What a fresh process measures.

    ``call`` is ``module:function``, ``args`` its keyword arguments (plain values). ``measure`` are
    keyword arguments of ``measure``; ``paths`` are put before the module search path.
    """

    call: str
    args: Mapping[str, Any] = field(default_factory=dict)
    measure: Mapping[str, Any] = field(default_factory=dict)
    paths: Sequence[str] = ()


class ProcessError(LoadkitError):
    """A measured process ended without figures."""

    code = "E_PROCESS"


def run_fresh(run: Run, *, timeout: float = 900.0, cwd: Path | None = None) -> Figures:
    """The figures of one run in a fresh process.

    Raises:
        LoadkitError: what the process met, with its code and exit code.
        ProcessError: it died, took more than ``timeout`` seconds, or said no figures.
        ResourceError: the system killed it.
    """
    spec = {"call": run.call, "args": dict(run.args), "measure": dict(run.measure)}
    paths = [*run.paths, *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if paths:
        env["PYTHONPATH"] = os.pathsep.join(paths)
    try:
        done = subprocess.run(
            [sys.executable, "-m", _CHILD, json.dumps(spec)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            cwd=cwd,
            env=env,
        )
    except subprocess.TimeoutExpired:
        raise ProcessError(f"{run.call} took more than {timeout:.0f} s") from None
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = (done.stderr.strip().splitlines() or ["no output"])[-1][:_SAID]
        if done.returncode == -9:
            raise ResourceError(f"the process of {run.call} was killed: {said}")
        raise ProcessError(
            f"the process of {run.call} ended with {done.returncode}: {said}",
            detail={"stderr": done.stderr[-4000:]},
        )
    figures: Figures = json.loads(lines[-1])
    if "error" in figures:
        raise _again(figures)
    return figures


def _again(figures: Figures) -> LoadkitError:
    """The error that a process told, here."""
    told = figures["error"]
    error = LoadkitError(
        told["message"],
        code=told["code"],
        **{key: told.get(key) for key in ("file", "tensor", "offset", "parameter", "hint")},
        detail=told.get("detail"),
    )
    error.exit_code = figures["exit_code"]
    return error


def medians(runs: Sequence[Figures]) -> Figures:
    """The median of every number; what is no number is taken from the first run."""
    median: Figures = {}
    for key, value in runs[0].items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        numbers = [run[key] for run in runs if key in run]
        median[key] = statistics.median(numbers) if is_number else value
    return median


def warm(files: Iterable[Path]) -> None:
    """Have every byte of the files in the page cache."""
    buffer = bytearray(8 << 20)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def drop_from_cache(files: Iterable[Path]) -> None:
    """Drop the files' clean pages. A run's ``disk_gib`` shows whether that worked."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def machine() -> Figures:
    """What figures are taken on; no names and no paths."""
    from importlib.metadata import PackageNotFoundError, version

    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    affinity = getattr(os, "sched_getaffinity", None)
    found: Figures = {
        "cpus": len(affinity(0)) if affinity is not None else os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "system": platform.system(),
        "kernel": ".".join(platform.release().split(".")[:2]),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    try:
        found["torch"] = version("torch")
    except PackageNotFoundError:
        pass
    return found
