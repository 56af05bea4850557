"""``loadkit plan``: what a load would do, on every rank, from headers alone."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import click

from loadkit.cli.config_summary import config_summary
from loadkit.cli.failures import problem_lines
from loadkit.cli.grouping import GROUP_HEADERS, grouped
from loadkit.cli.options import ModelRequest, model_options
from loadkit.cli.output import Output, human_bytes
from loadkit.sources.shown import shown_source

__all__ = ["command"]

# What a plan says once for all ranks.
HEAD = (
    "architecture", "model_class", "distribution", "load_format", "load_format_why", "dtype",
    "reader", "reader_why",
)  # fmt: skip
# What it says of each rank: bytes, then how they are read.
SIZES = ("bytes_needed", "bytes_to_read", "parameter_bytes", "predicted_peak_bytes")
READS = ("requests", "read_amplification", "bytes_fetched")
ROW_HEADERS = ["tensor", "file", "source", "parameter", "target", "exact", "kind"]


@click.command("plan")
@click.option("--rows", "with_rows", is_flag=True, help="List every tensor and its region.")
@model_options
@click.pass_obj
def command(out: Output, request: ModelRequest, with_rows: bool) -> int:
    """Plan the load of SOURCE, from headers alone; no weight byte is read.

    Every rank of --tp and --pp is planned, unless --rank names one. The exit code is 1 when the
    plan has problems.
    """
    document, plans = _plan_ranks(request, with_rows=with_rows)
    if out.as_json:
        out.emit(document)
    else:
        _show(out, request, document, plans, with_rows=with_rows)
    if document["ok"]:
        return 0
    sys.stdout.flush()
    problems = document["problems"]
    out.line(f"error: E_PLAN: {len(problems)} problem(s), the first:", to=sys.stderr)
    for line in problem_lines(problems[:1]):
        out.line(line, to=sys.stderr)
    return 1


def _plan_ranks(request: ModelRequest, *, with_rows: bool) -> tuple[dict[str, Any], list[Any]]:
    """The JSON document of all ranks, and the first rank's plan (in a list) for its details."""
    from loadkit import loader

    keywords = request.keywords(progress=False)
    document: dict[str, Any] = {"ok": True}
    problems: dict[tuple[Any, ...], dict[str, Any]] = {}
    ranks: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    first: list[Any] = []
    world = request.ranks()
    together = keywords["load_config"].distribute is not None
    plans: Iterable[Any] = (
        loader.plan_ranks(request.source, world, **keywords)  # each needs to know of the others
        if together
        else (loader.plan(request.source, parallel=each, **keywords) for each in world)
    )
    for parallel, plan in zip(world, plans, strict=True):
        if not first:
            first.append(plan)
            document |= {key: getattr(plan, key) for key in HEAD}
            document["notes"] = [note.to_dict() for note in plan.notes]
            if together:
                keys = ("distribute", "group_bytes_to_read")
                document |= {key: getattr(plan, key) for key in keys}
        where = {f"{axis}_rank": getattr(parallel, f"{axis}_rank") for axis in ("tp", "pp", "ep")}
        ranks.append(where | {key: getattr(plan, key) for key in (*SIZES, *READS)})
        document["ok"] = document["ok"] and plan.ok
        for problem in plan.problems:  # the same problem on another rank is one problem
            values = problem.to_dict()
            problems.setdefault(tuple(map(str, values.values())), values)
        if with_rows:
            rows += [row.to_dict() | where for row in plan.rows]
    document |= {"problems": list(problems.values()), "ranks": ranks}
    return document | ({"rows": rows} if with_rows else {}), first


def _show(
    out: Output,
    request: ModelRequest,
    document: Mapping[str, Any],
    plans: list[Any],
    *,
    with_rows: bool,
) -> None:
    out.fields(
        [
            ("source", shown_source(request.source)),
            ("config", config_summary(request, document["load_format"])),
            ("architecture", document["architecture"]),
            ("model class", _from(document["model_class"], document["distribution"])),
            ("load format", _because(document["load_format"], document["load_format_why"])),
            ("dtype", document["dtype"]),
            ("reader", _because(document["reader"], document["reader_why"])),
            ("parallel", f"tp {request.tp}, pp {request.pp}, ep {request.ep}"),
        ]
    )
    out.line()
    heads = [
        *("tp", "pp", "ep"),
        *("needed", "to read", "parameters", "predicted peak", "requests", "amplification"),
    ]
    out.table(
        heads,
        [
            [rank["tp_rank"], rank["pp_rank"], rank["ep_rank"]]
            + [human_bytes(rank[key]) for key in SIZES]
            + [rank["requests"], f"{rank['read_amplification']:.3f}"]
            for rank in document["ranks"]
        ],
        right=heads,
    )
    fetched = sum(rank["bytes_fetched"] for rank in document["ranks"])
    if fetched:
        out.line(f"fetched over the network for this: {human_bytes(fetched)}")
    if "distribute" in document:
        read = human_bytes(document["group_bytes_to_read"])
        out.line(f"all ranks of the layout together read {read}, each byte once")
    out.line()
    if with_rows:
        _show_rows(out, document["rows"])
    else:
        if len(document["ranks"]) > 1:
            out.line("the first of these ranks:")
        out.table(GROUP_HEADERS, grouped(row.to_dict() for row in plans[0].rows), right=["rows"])
    out.line()
    for line in problem_lines(document["notes"]):
        out.line(f"note: {line.strip()}")
    problems = document["problems"]
    out.line("ok: every parameter is filled" if document["ok"] else f"{len(problems)} problem(s):")
    for line in problem_lines(problems):
        out.line(line)


def _show_rows(out: Output, rows: list[dict[str, Any]]) -> None:
    """Every row, its rank first."""
    ranks = ["tp_rank", "pp_rank", "ep_rank"]
    cells = [
        ["/".join(str(row[rank]) for rank in ranks)]
        + [_region(row[key]) if key in ("source", "target") else row[key] for key in ROW_HEADERS]
        for row in rows
    ]
    out.table(["tp/pp/ep", *ROW_HEADERS], cells)


def _region(region: Mapping[str, Any] | None) -> str | None:
    """``[64, 576] @ 36864``; the strides only where they are not the plain ones."""
    if region is None:
        return None
    size, stride = region["size"], region["stride"]
    text = f"{list(size)} @ {region['offset']}"
    plain, step = [], 1
    for length in reversed(size):
        plain.append(step)
        step *= length
    return text if list(stride) == plain[::-1] else f"{text} stride {list(stride)}"


def _from(name: str | None, distribution: str | None) -> str | None:
    return name if name is None or distribution is None else f"{name} ({distribution})"


def _because(name: str | None, why: str | None) -> str | None:
    return name if name is None or not why else f"{name}: {why}"
