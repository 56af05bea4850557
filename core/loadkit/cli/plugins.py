"""plugins."""

from __future__ import annotations

import click

from loadkit.cli.options import output_options
from loadkit.cli.output import Output

__all__ = ["command"]


@click.command("plugins")
@output_options
@click.pass_obj
def command(out: Output) -> int:
    """P"""
    return 0
