"""Whether plugins can be imported, found out where a crash, an exit or a hang costs nothing."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

__all__ = ["probe"]

# table, name and value of an entry point
Where = tuple[str, str, str]

_CHILD = (
    "import json, sys; paths, rows, fd = json.loads(sys.argv[1]); sys.path[:] = paths\n"
    "from loadkit.cli.plugin_probe import answer; answer(rows, fd)"
)
MAX_ERROR = 500  # characters


def probe(plugins: Sequence[Where], *, timeout: float) -> list[Any]:
    """For each plugin None, or what importing it ends in; for one that says a state, that.

    All are imported by one process, in order; one that ends or holds up the process is charged
    with that, and a new process takes the rest. An entry point of the kind ``availability`` is
    asked too: its answer is the list of its state and its library's name.

    Args:
        plugins: what to import.
        timeout: seconds that one plugin may take.
    """
    answers: list[Any] = []
    while len(answers) < len(plugins):
        answers += _one_process(plugins[len(answers) :], timeout)
    return answers


def _one_process(plugins: Sequence[Where], timeout: float) -> list[Any]:
    """Answers for the first of ``plugins``, at least one; the last may be how the process ended."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, json.dumps([sys.path, list(plugins), writing])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[writing],
            start_new_session=True,
        )
        os.close(writing)
        try:
            answers, hung = _answers(pipe, len(plugins), timeout)
        finally:
            _end(child)
    if len(answers) < len(plugins):
        code = child.returncode
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        answers.append(
            f"importing it took longer than {timeout:g} s"
            if hung
            else f"importing it ended the process ({how})"
        )
    return answers


def _answers(pipe: Any, wanted: int, timeout: float) -> tuple[list[Any], bool]:
    """What the child said until it was done, gone, or silent for ``timeout`` seconds."""
    answers: list[Any] = []
    buffer = b""
    deadline = time.monotonic() + timeout
    while len(answers) < wanted:
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return answers, True
        data = pipe.read(65536)
        if not data:
            return answers, False
        buffer += data
        *lines, buffer = buffer.split(b"\n")
        if lines:
            answers += [json.loads(line) for line in lines]
            deadline = time.monotonic() + timeout
    return answers, False


def _end(child: subprocess.Popen[bytes]) -> None:
    """Wait a moment for an end of its own, then end it and whatever it started."""
    try:
        child.wait(timeout=0.5)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def answer(plugins: Sequence[Sequence[str]], fd: int) -> None:
    """In the child: import each plugin, and write a line of JSON for it: null, or the error.

    For one that says a state it is the list of that and its library.
    """
    from loadkit.entry_index import GROUPS, index

    groups = {kind: group for group, kind in GROUPS.items()}
    for kind, name, value in plugins:
        said: str | list[str | None] | None = None
        rows = [row for row in index().of_group(groups[kind]) if row.name == name]
        for row in rows:
            if row.value == value:
                said = _state(row) if kind == "availability" else _failure(row)
        if isinstance(said, str):
            said = said[:MAX_ERROR]
        os.write(fd, json.dumps(said).encode() + b"\n")


def _state(row: Any) -> str | list[str | None]:
    """What a distribution says of its format: state and library; or the error, as text."""
    from loadkit.availability import ask
    from loadkit.errors import PluginError

    try:
        return list(ask(row))
    except PluginError as error:
        cause = error.__cause__
        return f"{type(cause).__name__}: {cause}" if cause else error.message


def _failure(row: Any) -> str | None:
    from loadkit import plugins
    from loadkit.errors import PluginError
    from loadkit.plugin_guard import load_row

    try:
        found = load_row(row)
        if row.group == plugins.GROUP:
            plugins.register(found, row=row)
    except PluginError as error:
        cause = error.__cause__ or error
        return f"{type(cause).__name__}: {cause}"
    return None
