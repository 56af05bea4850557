"""``loadkit formats``: load formats, where they come from, and what is missing."""

from __future__ import annotations

from typing import Any

import click

from loadkit.cli.options import output_options
from loadkit.cli.output import Output

__all__ = ["command"]

NEEDS_EXTRA = "needs pip extra"
NOT_IN_VERSION = "not in this version"


@click.command("formats")
@output_options
@click.pass_obj
def command(out: Output) -> int:
    """List every load format: its distribution and version, its state, and how to install it.

    No loader is imported for this.
    """
    from loadkit import tables

    entries = tables.loaders.entries()
    versions = {entry.distribution: entry.version for entry in entries if entry.version}
    found: list[dict[str, Any]] = []
    for entry in entries:
        state, install = entry.state, entry.install
        if state == "not installed":
            state = NEEDS_EXTRA
            if entry.distribution in versions:  # what is installed does not have it
                state, install = NOT_IN_VERSION, ""
        found.append(
            {
                "name": entry.name,
                "distribution": entry.distribution,
                "version": versions.get(entry.distribution),
                "state": state,
                "install": install or None,
            }
        )
    if out.as_json:
        out.emit({"formats": found})
    else:
        keys = ["name", "distribution", "version", "state", "install"]
        out.table(keys, [[row[key] for key in keys] for row in found])
    return 0
