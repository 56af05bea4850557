"""What a command writes: words for people, or one JSON object. Nothing reaches a stream unescaped.

Names in checkpoints are data. Cells pass ``printable``, every line passes ``one_line``, and rich
gets ``Text`` objects only, so that no markup and no control character is ever interpreted.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from shutil import get_terminal_size
from typing import Any, TextIO

from loadkit.text import printable

__all__ = ["LONG_NAME", "Output", "human_bytes", "one_line"]

LONG_TABLE = 200  # rows; beyond that plain columns: rich takes milliseconds per row
RICH_GAP = 3  # columns between two of rich's, and at its edges
LONG_NAME = 1_200  # characters of a cell; a legal name has 1,024 bytes
LONG_LINE = 8_000  # characters


class Output:
    """One command's streams.

    Attributes:
        as_json: stdout gets exactly one JSON object, and nothing else.
        debug: errors come with their traceback.
        command: the command's name, for the JSON ``schema``.
        emitted: whether the JSON object is out already.
    """

    def __init__(self, *, as_json: bool = False, debug: bool = False) -> None:
        self.as_json = as_json
        self.debug = debug
        self.command = "cli"
        self.emitted = False

    def line(self, text: object = "", *, to: TextIO | None = None) -> None:
        """One line. A newline inside ``text`` is escaped like any other control character."""
        (to or sys.stdout).write(one_line(str(text)) + "\n")

    def fields(self, pairs: Iterable[tuple[str, object]]) -> None:
        """``label   value`` lines, aligned; pairs whose value is None are left out."""
        kept = [(label, str(value)) for label, value in pairs if value is not None]
        width = max((len(label) for label, _ in kept), default=0)
        for label, value in kept:
            self.line(f"{label:<{width}}  {value}")

    def table(
        self, headers: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[str] = ()
    ) -> None:
        """Rows in columns; the columns named in ``right`` are right-aligned.

        A person at a terminal gets rich's table where it fits. A pipe, or a table too long or too
        wide (names are of no use in pieces), gets plain columns, one row a line.
        """
        cells = [
            ["-" if cell is None else printable(cell, LONG_NAME) for cell in row] for row in rows
        ]
        widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
        room = get_terminal_size().columns - RICH_GAP * len(widths)
        if sys.stdout.isatty() and len(rows) <= LONG_TABLE and sum(widths) <= room:
            _rich_table(headers, cells, right)
        else:
            _plain_table(headers, cells, right, widths)

    def emit(self, values: Mapping[str, Any]) -> None:
        """The one JSON object of this run, on stdout, its ``schema`` first."""
        document = {"schema": f"loadkit.{self.command}/1", **values}
        text = _json_text(document)
        self.emitted = True
        sys.stdout.write(text + "\n")


def one_line(text: str) -> str:
    """``text`` without what could steer a terminal; harmless text, escapes too, stays as it is."""
    if len(text) > LONG_LINE:
        text = f"{text[:LONG_LINE]}... ({len(text)} characters)"
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def human_bytes(count: float | None) -> str:
    """``1.50 GiB``; below a KiB the plain number of bytes."""
    if count is None:
        return "-"
    if abs(count) < 1024:
        return f"{count} B"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if abs(value) < 1024:
            return f"{value:.2f} {unit}"
    return f"{value / 1024:.2f} TiB"


def _rich_table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]
) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for header in headers:
        justify: Any = "right" if header in right else "left"
        table.add_column(Text(header), justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(file=sys.stdout, markup=False, highlight=False, emoji=False).print(table)


def _plain_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[str],
    widths: Sequence[int],
) -> None:
    to_right = [header in right for header in headers]
    for line in (headers, *rows):
        cells = [
            cell.rjust(width) if at_right else cell.ljust(width)
            for cell, width, at_right in zip(line, widths, to_right, strict=True)
        ]
        sys.stdout.write("  ".join(cells).rstrip() + "\n")


def _json_text(document: Mapping[str, Any]) -> str:
    """ASCII JSON on one line; DEL, which JSON leaves as it is, is escaped too."""
    try:
        text = json.dumps(document, default=_plain, allow_nan=False)
    except ValueError:  # a NaN or an infinity, which JSON does not have
        text = json.dumps(_finite(document), default=_plain)
    return text.replace("\x7f", "\\u007f")


def _plain(value: object) -> object:
    """What JSON has no form for: sets become lists, anything else its text."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    return str(value)


def _finite(value: Any) -> Any:
    """The same values with null for each NaN and infinity."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
