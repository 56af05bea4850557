"""``loadkit plugins``: what is plugged in, and what is wrong with it."""

from __future__ import annotations

import sys
from typing import Any

import click

from loadkit.cli.options import output_options
from loadkit.cli.output import Output
from loadkit.cli.plugin_probe import probe

__all__ = ["command"]

KEYS = ("distribution", "version", "kind", "name", "state", "error")


@click.command("plugins")
@click.option(
    "--check/--no-check",
    default=True,
    help="Import third-party plugins, in a process of their own, to see whether that works.",
)
@click.option(
    "--timeout", type=click.FloatRange(min=0.1), default=10.0, show_default=True, metavar="S",
    help="Seconds that a plugin's import may take.",
)  # fmt: skip
@output_options
@click.pass_obj
def command(out: Output, check: bool, timeout: float) -> int:
    """List every plugin with its state: ready, broken, conflict, incompatible, disabled, stale.

    A broken plugin changes neither the listing of the others nor the exit code, unless
    LOADKIT_STRICT_PLUGINS is set.
    """
    from loadkit import plugins
    from loadkit.entry_index import index
    from loadkit.known_names import FIRST_PARTY, canonical
    from loadkit.plugin_guard import strict

    found: list[dict[str, Any]] = []
    asked: list[tuple[dict[str, Any], tuple[str, str, str]]] = []
    for kind, entry in plugins.entries():
        row: dict[str, Any] = {
            "distribution": entry.distribution,
            "version": entry.version or None,
            "kind": kind,
            "name": entry.name,
            "state": entry.state,
            "error": entry.error or None,
        }
        found.append(row)
        if entry.state == "ready" and canonical(entry.distribution) not in FIRST_PARTY:
            asked.append((row, (kind, entry.name, entry.value)))
    if check:
        failed = probe([where for _, where in asked], timeout=timeout)
        for (row, _), error in zip(asked, failed, strict=True):
            if error is not None:
                row.update(state="broken", error=error)
    notes = [*index().duplicates]
    notes += [f"LOADKIT_PLUGINS names {n}: no such plugin" for n in index().unknown_allowed]
    if out.as_json:
        out.emit({"plugins": found, "notes": notes})
    else:
        out.table(KEYS, [[row[key] for key in KEYS] for row in found])
        for note in notes:
            out.line(f"note: {note}")
    broken = sum(row["state"] not in ("ready", "disabled") for row in found)
    if not strict() or not (broken or index().unknown_allowed):
        return 0
    sys.stdout.flush()
    out.line(f"error: E_PLUGIN: {broken} plugin(s) cannot be used", to=sys.stderr)
    return 1
