"""``loadkit verify``: are a checkpoint's files what they should be?"""

from __future__ import annotations

import sys
from typing import Any

import click

from loadkit.cli.diff import comparison_options
from loadkit.cli.failures import problem_lines
from loadkit.cli.options import output_options
from loadkit.cli.output import Output, human_bytes
from loadkit.text import printable

__all__ = ["command"]

_option = click.option
_WORDS = {True: "ok", False: "BAD", None: "-"}


@click.command("verify")
@click.argument("source")
@_option("--against", metavar="SOURCE2", help="A checkpoint that it has to be equal to.")
@_option("--tolerance", type=click.FloatRange(min=0), metavar="T", help="Of that comparison.")
@_option("--finite", is_flag=True, help="Look for NaN and infinity, too.")
@_option("--load-format", default="auto", metavar="F", help="See 'loadkit formats'.")
@_option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="A LoadConfig field; may be repeated.",
)
@output_options
@click.pass_obj
def command(
    out: Output,
    source: str,
    against: str | None,
    tolerance: float | None,
    finite: bool,
    load_format: str,
    settings: tuple[str, ...],
) -> int:  # fmt: skip
    """Check the files of SOURCE: all there, whole, and holding the bytes that are vouched for.

    By the manifest, the index, the hub's digests and what archives keep of their own bytes, as far
    as there are any. The exit code is 1 where anything is wrong.
    """
    from loadkit.verify import verify

    report = verify(
        source,
        against=against,
        finite=finite,
        tolerance=tolerance,
        load_format=load_format,
        **comparison_options("auto", settings),
    )
    if out.as_json:
        out.emit(report.to_dict())
    else:
        _show(out, report)
    if report.ok:
        return 0
    sys.stdout.flush()
    out.line(f"error: E_VERIFY: {len(report.problems)} problem(s)", to=sys.stderr)
    for line in problem_lines([problem.to_dict() for problem in report.problems]):
        out.line(line, to=sys.stderr)
    return 1


def _show(out: Output, report: Any) -> None:
    total = sum(file["size"] for file in report.files.values())
    out.fields(
        [
            ("source", printable(report.source, ascii_only=False)),
            ("layout", report.layout or None),
            ("files", f"{len(report.files)}, {human_bytes(total)}"),
            ("tensors", report.tensors),
        ]
    )
    out.line()
    rows = [[check.name, _WORDS[check.ok], check.detail] for check in report.checks]
    out.table(["check", "", "what was found"], rows)
    out.line()
    out.line("ok" if report.ok else f"{len(report.problems)} problem(s)")
