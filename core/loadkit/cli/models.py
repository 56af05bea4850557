"""``loadkit models``: the architectures that are installed."""

from __future__ import annotations

from typing import Any

import click

from loadkit.cli.options import output_options
from loadkit.cli.output import Output

__all__ = ["command"]


@click.command("models")
@output_options
@click.pass_obj
def command(out: Output) -> int:
    """List every installed architecture: its class, its table, its distribution.

    No model is imported for this.
    """
    from loadkit import tables
    from loadkit.architecture_names import table_of

    found: list[dict[str, Any]] = [
        {
            "architecture": entry.name,
            "class": entry.value,
            "table": table_of(entry.name),
            "distribution": entry.distribution,
        }
        for entry in tables.models.entries()
        if entry.state != "not installed"
    ]
    if out.as_json:
        out.emit({"models": found})
    else:
        keys = ["architecture", "class", "table", "distribution"]
        out.table(keys, [[row[key] for key in keys] for row in found])
    return 0
