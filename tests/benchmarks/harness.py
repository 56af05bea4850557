"""Races: named variants, each run in a fresh process, in turns; medians as JSON and Markdown.

A variant is a function of a module of this folder: see ``loadkit.bench.measure`` for what is
measured of it. What was measured is kept after every run, so that a race which was stopped goes on
where it was.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.headings import heading
from loadkit.bench.measure import Figures
from loadkit.bench.processes import Run, drop_from_cache, machine, medians, run_fresh, warm
from loadkit.errors import LoadkitError

__all__ = [
    "Benchmark",
    "Claim",
    "Figures",
    "Variant",
    "machine",
    "paused",
    "run_benchmark",
    "table",
]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
FLOOR = "floor: one buffer"  # a row that begins so is the least that reading takes
_MOST = 12  # columns of a table
PAUSED = ROOT / ".cache" / "bench-paused"  # what was measured of races that are not through


@dataclass(frozen=True)
class Variant:
    """``call`` is ``module:function`` of this folder; ``args`` are its keyword arguments.

    ``needs`` are the packages without which it is skipped, by import name. ``files`` are its own,
    if it reads others than the race's.
    """

    name: str
    call: str
    args: Mapping[str, Any] = field(default_factory=dict)
    needs: Sequence[str] = ()
    files: Sequence[Path] | None = None


@dataclass(frozen=True)
class Claim:
    """What the figures must show: ``value`` of the medians by variant, at most or at least.

    ``value`` gives None where a variant is missing.
    """

    text: str
    value: Callable[[Mapping[str, Figures]], float | None]
    most: float | None = None
    least: float | None = None

    def judged(self, rows: Mapping[str, Figures]) -> Figures:
        """The claim with what was found, as plain values."""
        try:
            found = self.value(rows)
        except (KeyError, ZeroDivisionError):
            found = None
        ok = None if found is None else found <= (self.most if self.most is not None else found)
        if ok and self.least is not None and found is not None:
            ok = found >= self.least
        return {
            "text": self.text,
            "found": found,
            "most": self.most,
            "least": self.least,
            "ok": ok,
        }


@dataclass(frozen=True)
class Benchmark:
    """Variants of one race. ``base`` is the variant that ratios are taken to.

    ``files`` are warmed (or, if ``cold``, dropped from the page cache) before every run. ``end`` is
    the column that ratios are of: *touched* unless it is given (or the first). ``most`` is how
    often it is run at most. ``claims`` are judged in the end; they are about ``full`` sizes.
    """

    name: str
    variants: Sequence[Variant]
    base: str
    files: Sequence[Path] = ()
    cold: bool = False
    columns: Sequence[str] = ("returned_s", "touched_s", "cpu_s", "anon_mib", "rss_mib", "disk_gib")
    end: str | None = None
    most: int | None = None
    claims: Sequence[Claim] = ()
    about: str = ""


def run_benchmark(
    benchmark: Benchmark, runs: int, timeout: float = 900.0, keep: Path | None = None
) -> Figures:
    """Run every variant ``runs`` times, one after the other in turn.

    Args:
        benchmark: the race.
        runs: how often.
        timeout: seconds that one run may take.
        keep: a file that measured runs are kept in and taken from; it is removed at the end.

    Returns:
        ``name``, ``cold``, ``runs``, ``base``, ``columns``, and ``variants``: for each its
        ``median`` figures and all ``runs``. A variant that failed has ``error``, one that lacks a
        package ``skipped``.
    """
    runs = min(runs, benchmark.most or runs)
    seen = _kept(keep)
    failed: dict[str, str] = {}
    skipped = {v.name: why for v in benchmark.variants if (why := _missing(v))}
    for turn in range(runs):
        for variant in benchmark.variants:
            done = seen.setdefault(_key(variant), [])
            if variant.name in failed or variant.name in skipped or len(done) > turn:
                continue
            files = benchmark.files if variant.files is None else variant.files
            (drop_from_cache if benchmark.cold else warm)(files)
            try:
                done.append(_run_once(variant, timeout))
            except LoadkitError as error:
                failed[variant.name] = str(error)[:300]
            if keep is not None:
                keep.parent.mkdir(parents=True, exist_ok=True)
                keep.write_text(json.dumps(seen))
    if keep is not None and not failed:
        keep.unlink(missing_ok=True)
    rows: dict[str, Figures] = {}
    for variant in benchmark.variants:
        name = variant.name
        if name in skipped:
            rows[name] = {"skipped": skipped[name]}
        elif name in failed:
            rows[name] = {"error": failed[name]}
        else:
            figures = seen[_key(variant)][:runs]
            rows[name] = {"median": medians(figures), "runs": figures}
    found = {name: row["median"] for name, row in rows.items() if "median" in row}
    return {
        "name": benchmark.name,
        "about": benchmark.about,
        "cold": benchmark.cold,
        "runs": runs,
        "base": benchmark.base,
        "columns": list(benchmark.columns),
        "end": benchmark.end,
        "variants": rows,
        "claims": [claim.judged(found) for claim in benchmark.claims],
    }


def paused(stem: str) -> Path:
    """Where the runs of a race are kept until it is through."""
    return PAUSED / f"{stem}.json"


def _kept(keep: Path | None) -> dict[str, list[Figures]]:
    if keep is None or not keep.is_file():
        return {}
    found: dict[str, list[Figures]] = json.loads(keep.read_text())
    return found


def _key(variant: Variant) -> str:
    return json.dumps([variant.name, variant.call, dict(variant.args)])


def _missing(variant: Variant) -> str:
    """Why a variant cannot run here; empty if it can."""
    lacking = [name for name in variant.needs if find_spec(name) is None]
    return f"not installed: {', '.join(lacking)} (requirements-bench.txt)" if lacking else ""


def _run_once(variant: Variant, timeout: float) -> Figures:
    paths = [str(HERE.parent)]
    run = Run(f"benchmarks.{variant.call}", variant.args, paths=paths)
    return run_fresh(run, timeout=timeout, cwd=ROOT)


# -- results ---------------------------------------------------------------------------------------


def table(result: Figures) -> str:
    """One benchmark as a Markdown table; ratios are of the *touched* end (or *returned*).

    More than a dozen columns become rows.
    """
    columns = list(result["columns"])
    end = result.get("end") or ("touched_s" if "touched_s" in columns else columns[0])
    bare = heading(end).rpartition(", ")[0] or heading(end)
    under = {f"{bare} / {result['base']}": _figure(result, result["base"], end)}
    floor = next((name for name in result["variants"] if name.startswith(FLOOR)), None)
    if floor is not None and floor != result["base"]:
        under[f"{bare} / floor"] = _figure(result, floor, end)
    state = "cold" if result["cold"] else "warm"
    lines = [f"### {result['name']} ({state}, median of {result['runs']})", ""]
    if result.get("about"):
        lines += [result["about"], ""]
    grid = [["", *map(heading, columns), *under]]
    for name, row in result["variants"].items():
        why = next((f"{key}: {row[key]}" for key in ("error", "skipped") if key in row), None)
        if why is not None:
            why = why.replace("error: ", "failed: ").replace("|", "/")
            grid.append([name, why, *[""] * (len(columns) + len(under) - 1)])
            continue
        median = row["median"]
        cells = [_cell(median.get(column)) for column in columns]
        cells += [f"{median[end] / o:.2f}" if o and end in median else "" for o in under.values()]
        grid.append([name, *cells])
    if len(columns) > _MOST:
        grid = [list(row) for row in zip(*grid, strict=True)]
    lines += [f"| {' | '.join(row)} |".replace("|  |", "| |", 1) for row in grid]
    lines.insert(-len(grid) + 1, "|---" + "|---:" * (len(grid[0]) - 1) + "|")
    lines.append("")
    lines += [_said(claim) for claim in result.get("claims", ())]
    return "\n".join([*lines, ""] if result.get("claims") else lines)


def _figure(result: Figures, name: str, column: str) -> float | None:
    """One variant's median, if it has one."""
    found: float | None = result["variants"].get(name, {}).get("median", {}).get(column)
    return found


def _said(claim: Figures) -> str:
    """A claim as a line of a list."""
    limit = [f"at most {claim['most']:g}"] if claim["most"] is not None else []
    limit += [f"at least {claim['least']:g}"] if claim["least"] is not None else []
    word = {True: "met", False: "**not met**", None: "not measured"}[claim["ok"]]
    found = "" if claim["found"] is None else f": {claim['found']:.3g}"
    return f"- {claim['text']} ({', '.join(limit)}){found} - {word}"


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None else str(value)


if __name__ == "__main__":
    sys.exit("run run_all.py")
