"""Runs named variants, each run in a fresh process, interleaved; medians as JSON and Markdown.

A variant is a function of a module of this folder. It imports and prepares, and returns a second
function; only that one is measured. What it returns is the *returned* end; then one byte of every
page of its tensors is read: the *touched* end. A run's figures:

    returned_s, touched_s   seconds until each end
    cpu_s                   CPU seconds of all threads until *touched*
    anon_mib                peak anonymous memory above the start (sampled every 2 ms)
    rss_mib                 peak resident memory above the start, file pages included
    read_gib, disk_gib      bytes given by read calls; bytes that came from storage
    minor_faults            page faults served without storage
    checksum                of all tensors' bytes, whatever their order: equal for equal weights
"""

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

__all__ = ["Benchmark", "Variant", "drop_from_cache", "machine", "run_benchmark", "table", "warm"]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
Figures = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """``call`` is ``module:function`` of this folder; ``args`` are its keyword arguments."""

    name: str
    call: str
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Benchmark:
    """Variants of one race. ``base`` is the variant that ratios are taken to.

    ``files`` are warmed (or, if ``cold``, dropped from the page cache) before every run. ``end`` is
    the column that ratios are of: *touched* unless it is given (or the first). ``most`` is how
    often it is run at most.
    """

    name: str
    variants: Sequence[Variant]
    base: str
    files: Sequence[Path] = ()
    cold: bool = False
    columns: Sequence[str] = ("returned_s", "touched_s", "cpu_s", "anon_mib", "rss_mib", "disk_gib")
    end: str | None = None
    most: int | None = None


def run_benchmark(benchmark: Benchmark, runs: int, timeout: float = 900.0) -> Figures:
    """Run every variant ``runs`` times, one after the other in turn.

    Returns:
        ``name``, ``cold``, ``runs``, ``base``, ``columns``, and ``variants``: for each its
        ``median`` figures and all ``runs``. A variant that failed has ``error``.
    """
    runs = min(runs, benchmark.most or runs)
    seen: dict[str, list[Figures]] = {variant.name: [] for variant in benchmark.variants}
    failed: dict[str, str] = {}
    for _ in range(runs):
        for variant in benchmark.variants:
            if variant.name in failed:
                continue
            (drop_from_cache if benchmark.cold else warm)(benchmark.files)
            try:
                seen[variant.name].append(_run_once(variant, timeout))
            except RuntimeError as error:
                failed[variant.name] = str(error)
    rows: dict[str, Figures] = {}
    for name, figures in seen.items():
        rows[name] = {"error": failed[name]} if name in failed else _medians(figures)
    return {
        "name": benchmark.name,
        "cold": benchmark.cold,
        "runs": runs,
        "base": benchmark.base,
        "columns": list(benchmark.columns),
        "end": benchmark.end,
        "variants": rows,
    }


def _run_once(variant: Variant, timeout: float) -> Figures:
    spec = json.dumps({"call": variant.call, "args": dict(variant.args)})
    try:
        done = subprocess.run(
            [sys.executable, str(HERE / "run_one.py"), spec],
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"},
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"took more than {timeout:.0f} s") from None
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no output"])[-1][:300])
    figures: Figures = json.loads(lines[-1])
    return figures


def _medians(runs: Sequence[Figures]) -> Figures:
    """The median of every number; what is no number is taken from the first run."""
    median: Figures = {}
    for key, value in runs[0].items():
        numbers = isinstance(value, (int, float)) and key != "checksum"
        median[key] = statistics.median(run[key] for run in runs) if numbers else value
    return {"median": median, "runs": list(runs)}


# -- the page cache --------------------------------------------------------------------------------


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


# -- results ---------------------------------------------------------------------------------------


def machine() -> Figures:
    """What the figures were taken on."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def table(result: Figures) -> str:
    """One benchmark as a Markdown table; ratios are of the *touched* end (or *returned*)."""
    columns = list(result["columns"])
    end = result.get("end") or ("touched_s" if "touched_s" in columns else columns[0])
    base = result["variants"].get(result["base"], {}).get("median", {}).get(end)
    state = "cold" if result["cold"] else "warm"
    lines = [
        f"### {result['name']} ({state}, median of {result['runs']})",
        "",
        f"| | {' | '.join(columns)} | {end} / {result['base']} |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for name, row in result["variants"].items():
        if "error" in row:
            cells = [f"failed: {row['error'].replace('|', '/')}", *[""] * len(columns)]
        else:
            median = row["median"]
            cells = [_cell(median.get(column)) for column in columns]
            cells.append(f"{median[end] / base:.2f}" if base else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None else str(value)
