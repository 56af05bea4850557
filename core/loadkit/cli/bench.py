"""``loadkit bench``: how long a load takes on this machine, beside what the machine can do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from loadkit.cli.options import ModelRequest, model_options
from loadkit.cli.output import Output, human_bytes
from loadkit.errors import LoadkitError, OptionError
from loadkit.sources.shown import shown_source

if TYPE_CHECKING:
    from loadkit.bench.measure import Figures
    from loadkit.bench.processes import Run

__all__ = ["command"]

ENDS = ("returned", "touched", "forward")
FLOOR = "floor"
_RUNS = "loadkit.cli.bench_runs"


class _Asked(NamedTuple):
    """What is measured: the plan's words, its local files, and whether they are cold."""

    plan: Any
    files: list[Path]
    cold: bool
    timeout: float


@click.command("bench")
@model_options
@click.option(
    "--repeats",
    type=click.IntRange(min=1, max=1000),
    default=5,
    show_default=True,
    metavar="N",
    help="Runs of each measurement; the median counts.",
)
@click.option(
    "--end",
    "ends",
    type=click.Choice(ENDS),
    multiple=True,
    help="Where the clock stops (repeatable); all three if none is given.",
)
@click.option("--reader", metavar="R", help="What moves the bytes.")
@click.option("--cold", is_flag=True, help="Drop the files from the page cache before each run.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=900.0,
    show_default=True,
    metavar="S",
    help="Seconds that one run may take.",
)
@click.pass_obj
def command(
    out: Output,
    request: ModelRequest,
    repeats: int,
    ends: tuple[str, ...],
    reader: str | None,
    cold: bool,
    timeout: float,
) -> int:
    """Measure loads of SOURCE, each in a fresh process, against the floor of this machine.

    The clock stops when load() returned, when a byte of every page was read (views of files cost
    nothing before), or when the model answered a first prompt. The floor is a plain read of the
    same files into one buffer.
    """  # fmt: skip
    from loadkit.bench.processes import machine

    request = _one_rank(request, ends)
    if reader is not None:
        request = replace(request, settings=(*request.settings, f"reader={reader}"))
    if not ends:
        several = request.tp * request.pp > 1
        ends = ENDS[:2] if several else ENDS
    asked = _asked(request, cold, timeout)
    rows = _measured(asked, request, tuple(dict.fromkeys(ends)), repeats)
    plan = asked.plan
    document: dict[str, Any] = {
        "ok": True,
        "architecture": plan.architecture,
        "load_format": plan.load_format,
        "reader": plan.reader,
        "reader_why": plan.reader_why,
        "device": request.device or "cpu",
        "cold": cold,
        "repeats": repeats,
        "bytes_needed": plan.bytes_needed,
        "bytes_to_read": plan.bytes_to_read,
        "machine": machine(),
        "rows": rows,
    }
    if out.as_json:
        out.emit(document)
    else:
        _show(out, request, document)
    return 0


def _one_rank(request: ModelRequest, ends: Sequence[str]) -> ModelRequest:
    """The request, for one rank alone.

    Raises:
        OptionError: several ranks and none named, or a forward that needs the others.
    """
    if request.tp * request.pp == 1:
        return request
    if request.rank is None:
        raise OptionError("bench measures one rank: say which with --rank")
    if "forward" in ends:
        raise OptionError(
            "a forward needs every rank; with --tp and --pp the ends are returned and touched"
        )
    return request


def _asked(request: ModelRequest, cold: bool, timeout: float) -> _Asked:
    """The plan, and the paths of the files that it reads.

    Raises:
        PlanError: the plan has problems.
        OptionError: files that cannot be dropped from the page cache.
    """
    from loadkit import loader
    from loadkit.config import LoadConfig
    from loadkit.resolve import open_for

    keywords = request.keywords(progress=False)
    parallel = request.ranks()[0]
    plan = loader.plan(request.source, parallel=parallel, **keywords)
    plan.raise_if_bad()
    load_config: LoadConfig = keywords["load_config"]
    load_config = replace(load_config, load_format=plan.load_format)
    with open_for(request.source, load_config) as source:
        paths = [source.open(name).path for name in plan.files]
    files = [Path(path) for path in paths if path is not None]
    if cold and len(files) < len(paths):
        raise OptionError("--cold drops local files from the page cache; some here are not local")
    return _Asked(plan, files if len(files) == len(paths) else [], cold, timeout)


def _measured(
    asked: _Asked, request: ModelRequest, ends: Sequence[str], repeats: int
) -> list[dict[str, Any]]:
    """One row for the floor and for each end; runs of all of them take turns."""
    from loadkit.bench.processes import drop_from_cache, run_fresh, warm

    runs = dict(_runs(asked, request, ends))
    seen: dict[str, list[Figures]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            (drop_from_cache if asked.cold else warm)(asked.files)
            try:
                seen[name].append(run_fresh(run, timeout=asked.timeout))
            except LoadkitError as error:
                error.add_note(f"while measuring: {name}")
                raise
    return _rows(asked, ends, seen)


def _runs(asked: _Asked, request: ModelRequest, ends: Sequence[str]) -> Iterator[tuple[str, Run]]:
    """The processes of one round. Returned and touched are two ends of one run."""
    from loadkit.bench.processes import Run

    if asked.files:
        paths = [str(path) for path in asked.files]
        untouched = {"touch_pages": False, "with_checksum": False}
        yield FLOOR, Run("loadkit.bench.floor:read_files", {"paths": paths}, untouched)
    request_values = {"request": asdict(request)}
    if set(ends) - {"forward"}:
        measure = {"touch_pages": "touched" in ends, "with_checksum": False}
        yield "load", Run(f"{_RUNS}:load", request_values, measure)
    if "forward" in ends:
        measure = {"touch_pages": False, "with_checksum": False}
        yield "forward", Run(f"{_RUNS}:forward", request_values, measure)


def _rows(
    asked: _Asked, ends: Sequence[str], seen: dict[str, list[Figures]]
) -> list[dict[str, Any]]:
    whole = sum(path.stat().st_size for path in asked.files)
    floor = _row(FLOOR, whole, seen[FLOOR], "returned_s") if FLOOR in seen else None
    rows = [floor] if floor else []
    for end in ENDS:
        if end in ends:
            key = "touched_s" if end == "touched" else "returned_s"
            runs = seen["forward" if end == "forward" else "load"]
            rows.append(_row(end, asked.plan.bytes_needed, runs, key))
    for row in rows:
        row["of_floor"] = row["gib_per_s"] / floor["gib_per_s"] if floor else None
    return rows


def _row(name: str, nbytes: int, runs: Sequence[Figures], key: str) -> dict[str, Any]:
    """One row: medians over its runs. Seconds and bytes."""
    from loadkit.bench.processes import medians

    median = medians(runs)
    seconds = median[key]

    def taken(figure: str, unit: int) -> int | None:
        return None if figure not in median else round(median[figure] * unit)

    return {
        "name": name,
        "seconds": seconds,
        "seconds_all": [run[key] for run in runs],
        "gib_per_s": nbytes / 2**30 / seconds if seconds else 0.0,
        "cpu_seconds": median["cpu_s"],
        "anonymous_bytes": taken("anon_mib", 2**20),
        "bytes_read": taken("read_gib", 2**30),
        "storage_bytes": taken("disk_gib", 2**30),
        "minor_faults": round(median["minor_faults"]),
        "major_faults": round(median["major_faults"]),
    }


def _show(out: Output, request: ModelRequest, document: dict[str, Any]) -> None:
    out.fields(
        [
            ("source", shown_source(request.source)),
            ("architecture", document["architecture"]),
            ("load format", document["load_format"]),
            ("reader", f"{document['reader']}: {document['reader_why']}"),
            ("needed", human_bytes(document["bytes_needed"])),
            ("page cache", "cold" if document["cold"] else "warm"),
            ("runs", f"median of {document['repeats']}, each in a fresh process"),
        ]
    )
    out.line()
    headers = ["", "seconds", "GiB/s", "of floor", "CPU s", "peak anonymous", "by read calls",
               "from storage", "minor faults", "major faults"]  # fmt: skip
    cells = [
        [
            row["name"],
            f"{row['seconds']:.3f}",
            f"{row['gib_per_s']:.2f}",
            "-" if row["of_floor"] is None else f"{row['of_floor']:.2f}",
            f"{row['cpu_seconds']:.2f}",
            *(human_bytes(row[k]) for k in ("anonymous_bytes", "bytes_read", "storage_bytes")),
            row["minor_faults"],
            row["major_faults"],
        ]
        for row in document["rows"]
    ]
    out.table(headers, cells, right=headers[1:])
