"""``loadkit load``: load a model, report what it took, let it go."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from loadkit.cli.options import ModelRequest, model_options
from loadkit.cli.output import LONG_NAME, Output, human_bytes
from loadkit.sources.shown import shown_source
from loadkit.text import printable

if TYPE_CHECKING:
    from loadkit.config import ParallelConfig

__all__ = ["command"]

LISTED = 8  # items of a list shown to people; --json has all of them


@click.command("load")
@model_options
@click.pass_obj
def command(out: Output, request: ModelRequest) -> int:
    """Load SOURCE and report what it took.

    With --rank that rank is loaded, else every rank of --tp and --pp, one after the other in this
    process, each freed before the next. With --set distribute=broadcast one process per rank is
    started, and they load together.
    """
    from loadkit import loader

    keywords = request.keywords(progress=sys.stderr.isatty() and not out.as_json)
    document: dict[str, Any] = {"ok": True}
    reports: list[dict[str, Any]] = []
    world = request.ranks()
    together = request.rank is None and keywords["load_config"].distribute is not None
    if together:
        from loadkit.load_ranks import load_on_ranks

        for parallel, found in zip(
            world, load_on_ranks(request.source, world, keywords), strict=True
        ):
            reports.append(_where(parallel) | found.pop("report"))
            document |= found
    for parallel in () if together else world:
        result = loader.load(request.source, parallel=parallel, **keywords)
        for key in ("architecture", "model_class", "distribution", "load_format"):
            document.setdefault(key, getattr(result.plan, key))
        reports.append(_where(parallel) | result.report.to_dict())
        del result  # a model holds cycles: what it takes must be gone before the next rank
        gc.collect()
    if out.as_json:
        out.emit(document | {"ranks": reports})
    else:
        _show(out, request, document, reports)
    return 0


def _where(parallel: ParallelConfig) -> dict[str, int]:
    return {f"{axis}_rank": getattr(parallel, f"{axis}_rank") for axis in ("tp", "pp", "ep")}


def _show(
    out: Output,
    request: ModelRequest,
    document: Mapping[str, Any],
    reports: list[dict[str, Any]],
) -> None:
    keys = ("architecture", "model_class", "distribution", "load_format")
    labels = [(key.replace("_", " "), document.get(key)) for key in keys]
    out.fields([("source", shown_source(request.source)), *labels])
    for report in reports:
        out.line()
        tp, pp, ep = (report[f"{axis}_rank"] for axis in ("tp", "pp", "ep"))
        out.line(f"rank tp {tp}/{request.tp}, pp {pp}/{request.pp}, ep {ep}/{request.ep}")
        left_out = {*keys, "source", "parallel", "tp_rank", "pp_rank", "ep_rank"}
        out.fields(
            (f"  {key.replace('_', ' ')}", _shown(key, value))
            for key, value in report.items()
            if key not in left_out
        )


def _shown(key: str, value: Any) -> object:
    """A report's value for people: bytes and seconds with units, long lists by their start."""
    if isinstance(value, str):
        return printable(value, LONG_NAME, ascii_only=False)
    if isinstance(value, int) and "bytes" in key:
        return human_bytes(value)
    if isinstance(value, float):
        return f"{value:.3f} s" if "seconds" in key else f"{value:.3f}"
    if isinstance(value, Mapping):
        parts = [f"{printable(k)} {_shown(f'{key} {k}', item)}" for k, item in value.items()]
        return _some(parts, ", ")
    if isinstance(value, list | tuple):
        return _some([str(_shown(key, item)) for item in value], "; ")
    return value


def _some(parts: list[str], between: str) -> str:
    """The first of some parts, and how many there are."""
    shown = between.join(parts[:LISTED])
    return f"{shown}; ... ({len(parts)} in all)" if len(parts) > LISTED else shown or "none"
