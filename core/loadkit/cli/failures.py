"""How a failure ends a run: the typed error as the last lines on stderr, and its exit code."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from loadkit.cli.output import Output
from loadkit.errors import LoadkitError, ReadError, ResourceError, UsageError
from loadkit.load_plan import SHOWN, problem_line
from loadkit.text import printable

__all__ = ["fail", "interrupted", "problem_lines", "typed"]

INTERRUPTED = 130  # 128 + SIGINT, as shells count


def typed(error: BaseException) -> LoadkitError | None:
    """The error as one of loadkit's own, or None if it is a defect of loadkit or of a plugin."""
    if isinstance(error, LoadkitError):
        return error
    if isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)
        hint = f"{context.command_path} --help" if context is not None else None
        return UsageError(error.format_message(), hint=hint)
    if isinstance(error, OSError):
        return ReadError(str(error), errno=error.errno, file=error.filename)
    if isinstance(error, MemoryError):
        return ResourceError("out of memory", detail=str(error) or None)
    return None


def fail(out: Output, error: BaseException) -> int:
    """Report ``error`` on stderr (and on stdout under ``--json``); returns the exit code."""
    known = typed(error)
    if out.as_json and not out.emitted:
        out.emit(_error_object(known, error))
        sys.stdout.flush()
    if out.debug:
        for line in "".join(traceback.format_exception(error)).splitlines():
            out.line(line, to=sys.stderr)
    for line in _typed_lines(known) if known is not None else _internal_lines(error, out.debug):
        out.line(line, to=sys.stderr)
    return known.exit_code if known is not None else 1


def interrupted(out: Output) -> int:
    """Say that the user stopped the run; returns the exit code."""
    if out.as_json and not out.emitted:
        stopped = LoadkitError("interrupted", code="E_INTERRUPTED")
        out.emit({"ok": False, "error": stopped.to_dict()})
    out.line("interrupted", to=sys.stderr)
    return INTERRUPTED


def problem_lines(problems: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Ten problems of a plan, one a line, and how many more there are."""
    for problem in problems[:SHOWN]:
        yield f"  {problem_line(problem)}"
    if len(problems) > SHOWN:
        more = len(problems) - SHOWN
        yield f"  ... and {more} more ({len(problems)} in all; --json lists every one)"


def _problems(error: LoadkitError) -> list[Mapping[str, Any]]:
    """A PlanError's problems as plain values."""
    found = getattr(error, "problems", ())
    return [item if isinstance(item, Mapping) else item.to_dict() for item in found]


def _error_object(known: LoadkitError | None, error: BaseException) -> dict[str, Any]:
    if known is None:
        message = f"{type(error).__name__}: {error}"
        internal = LoadkitError(message, code="E_INTERNAL", hint="run it again with --debug")
        return {"ok": False, "error": internal.to_dict()}
    body: dict[str, Any] = {"ok": False, "error": known.to_dict()}
    problems = _problems(known)
    return body | {"problems": problems} if problems else body


def _typed_lines(error: LoadkitError) -> Iterator[str]:
    """Code and message first, then where it is, then what to do."""
    problems = _problems(error)  # they are lines of their own, and need not be in the message
    message = error.message.partition("\n")[0] if problems else error.message
    yield f"error: {error.code}: {message}"
    yield from problem_lines(problems)
    for key in ("file", "tensor", "offset", "parameter"):
        value = getattr(error, key)
        if value is not None:
            yield f"  {key}: {printable(value)}"
    cause = error.__cause__
    if cause is not None and str(cause) not in error.message:
        yield f"  cause: {type(cause).__name__}: {cause}"
    for note in getattr(error, "__notes__", ()):  # those of many lines are a rank's traceback
        if "\n" not in note:
            yield f"  note: {printable(note, ascii_only=False)}"
    if error.hint and not problems:
        yield f"  hint: {error.hint}"


def _internal_lines(error: BaseException, debug: bool) -> Iterator[str]:
    yield f"error: E_INTERNAL: {type(error).__name__}: {error}"
    if not debug:
        yield "  hint: this is a defect; run it again with --debug to see where it happens"
