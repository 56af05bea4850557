"""The table of docs/reference/formats.md: ``python tests/contract/formats/table.py`` writes it."""

from __future__ import annotations

import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[3] / "docs/reference/formats.md"
START, END = "<!-- made by tests/contract/formats/table.py -->", "<!-- end -->"
COLUMNS = (
    "load format", "distribution", "tp slices", "streamed", "zero-copy", "verified", "remote plan",
    "save", "numbers",
)  # fmt: skip


def table() -> str:
    """The table, made from the classes beside this file."""
    from contract.formats import FORMATS

    rows = [COLUMNS, tuple("-" * 3 for _ in COLUMNS)]
    rows += [
        (
            f"`{one.name}`",
            one.distribution,
            *(_word(flag) for flag in (one.tp_slices, one.streamed, one.zero_copy)),
            one.verified or ("digest" if one.digest else "no"),
            *(_word(flag) for flag in (one.remote_plan, one.save)),
            "the same" if one.lossless else f"within {one.bound:g}",
        )
        for one in FORMATS
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def on_page() -> str:
    """The table that is committed."""
    return PAGE.read_text().partition(START + "\n")[2].partition(END)[0]


def _word(flag: bool) -> str:
    return "yes" if flag else "no"


def main() -> None:
    """Write the table into the page."""
    before, _, rest = PAGE.read_text().partition(START)
    PAGE.write_text(f"{before}{START}\n{table()}{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    sys.path[0] = str(
        Path(__file__).resolve().parents[2]
    )  # beside it are modules named as libraries
    main()
