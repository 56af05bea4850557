"""``loadkit formats``: load formats, where they come from, and what is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from loadkit.cli.options import output_options
from loadkit.cli.output import Output

if TYPE_CHECKING:
    from loadkit.availability import Availability
    from loadkit.claims import Entry
    from loadkit.entry_index import Row

__all__ = ["command", "format_rows"]

NOT_IN_VERSION = "not in this version"
KEYS = ("name", "distribution", "version", "library", "library_version", "state", "install")
SECONDS = 10.0  # that a third party's answer may take


@click.command("formats")
@output_options
@click.pass_obj
def command(out: Output) -> int:
    """List every load format: its distribution, the library behind it, its state, its pip line.

    No loader and no library is imported for this.
    """
    found = format_rows()
    if out.as_json:
        out.emit({"formats": found})
    else:
        out.table(KEYS, [[row[key] for key in KEYS] for row in found])
    return 0


def format_rows() -> list[dict[str, Any]]:
    """Every load format, known or found, as ``loadkit formats --json`` lists it."""
    from loadkit import tables

    entries = tables.loaders.entries()
    versions = {entry.distribution: entry.version for entry in entries if entry.version}
    said = _answers([entry for entry in entries if entry.state == "ready"])
    return [_row(entry, versions, said.get((entry.name, entry.distribution))) for entry in entries]


def _row(entry: Entry, versions: dict[str, str], said: Availability | None) -> dict[str, Any]:
    from loadkit.availability import NEEDS_EXTRA, installed_version, library_of
    from loadkit.known_names import KNOWN, canonical, pip_line

    state, install = entry.state, entry.install
    known = KNOWN["loaders"].get(entry.name)
    ours = known is not None and canonical(entry.distribution) == known.distribution
    library = library_of(entry.name) if ours else None
    if state == "not installed":
        state = NEEDS_EXTRA
        if entry.distribution in versions:  # what is installed does not have it
            state, install = NOT_IN_VERSION, ""
    elif said is not None:
        state, library, line = said
        install = line if state == NEEDS_EXTRA and line else install
    if state == NEEDS_EXTRA and not install:  # the distribution is there, its library is not
        install = pip_line(known.extra) if known and ours else f"pip install {library}"
    return {
        "name": entry.name,
        "distribution": entry.distribution,
        "version": versions.get(entry.distribution),
        "library": library,
        "library_version": installed_version(library) if library else None,
        "state": state,
        "install": install or None,
    }


def _answers(entries: list[Entry]) -> dict[tuple[str, str], Availability]:
    """What distributions say of their formats. A third party is asked in a process of its own."""
    from loadkit.availability import Availability, ask, availability_rows, library_of
    from loadkit.cli.plugin_probe import probe
    from loadkit.errors import PluginError
    from loadkit.known_names import FIRST_PARTY, canonical

    rows = availability_rows()
    found: dict[tuple[str, str], Availability] = {}
    others: list[Row] = []
    for entry in entries:
        row = rows.get((entry.name, entry.distribution))
        if row is None:
            continue
        if canonical(row.distribution) not in FIRST_PARTY:
            others.append(row)
            continue
        try:
            found[row.name, row.distribution] = ask(row)
        except PluginError:  # `loadkit plugins` tells more
            found[row.name, row.distribution] = Availability("broken", library_of(row.name))
    told = probe([("availability", r.name, r.value) for r in others], timeout=SECONDS)
    for row, answer in zip(others, told, strict=True):
        good = isinstance(answer, list) and len(answer) == 3
        found[row.name, row.distribution] = Availability(*answer if good else ("broken", None))
    return found
