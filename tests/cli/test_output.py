"""Words and JSON: nothing from a file steers a terminal."""

from __future__ import annotations

import json
import sys

import pytest

from helpers.cli import BIDI, CONTROLS, Ran
from loadkit.cli.output import LONG_TABLE, Output, human_bytes, one_line

HOSTILE = "".join(CONTROLS) + "".join(BIDI) + "\n\u2028\ud800"


def test_one_line_keeps_plain_and_escaped_text_and_escapes_the_rest() -> None:
    assert one_line(r"a 'b' \x1b é") == r"a 'b' \x1b é"
    assert one_line("a\x1b]0;pwn\x07\nb\u202e") == r"a\x1b]0;pwn\x07\nb\u202e"
    assert one_line(HOSTILE).isprintable()


def test_one_line_bounds_what_it_shows() -> None:
    assert len(one_line("x" * 1_000_000)) < 10_000


@pytest.mark.parametrize("rows", [1, LONG_TABLE + 1], ids=["rich", "plain"])
def test_tables_escape_cells_on_a_terminal_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "4000")
    Output().table(["name"], [[HOSTILE + "[bold red]x[/] :smile:"]] * rows)
    out = capsys.readouterr().out
    Ran(0, out, "").assert_clean()
    assert "[bold red]x[/] :smile:" in out


def test_a_table_too_wide_for_the_terminal_keeps_names_in_one_piece(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    Output().table(["name"], [["a" * 200]])
    assert "a" * 200 in capsys.readouterr().out


def test_plain_tables_align_columns_and_never_wrap(capsys: pytest.CaptureFixture[str]) -> None:
    Output().table(["n", "name"], [[1, "a" * 300], [20, None]], right=["n"])
    assert capsys.readouterr().out.splitlines() == [" n  name", " 1  " + "a" * 300, "20  -"]


def test_json_is_one_ascii_line_with_schema_first(capsys: pytest.CaptureFixture[str]) -> None:
    out = Output(as_json=True)
    out.command = "plan"
    out.emit({"ok": True, "name": HOSTILE, "nan": float("nan"), "set": {2, 1}})
    text = capsys.readouterr().out
    Ran(0, text, "").assert_clean()
    assert text.startswith('{"schema": "loadkit.plan/1", ')
    assert text.count("\n") == 1
    assert json.loads(text)["name"] == HOSTILE
    assert json.loads(text)["nan"] is None
    assert json.loads(text)["set"] == [1, 2]


@pytest.mark.parametrize(
    ("count", "shown"),
    [(None, "-"), (0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (3 << 30, "3.00 GiB"),
     (5 << 40, "5.00 TiB")],
)  # fmt: skip
def test_bytes_for_people(count: int | None, shown: str) -> None:
    assert human_bytes(count) == shown
