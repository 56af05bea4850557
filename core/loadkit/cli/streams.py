"""stdout and stderr made safe for what a run may write: logs escaped, no encoding errors."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loadkit.cli.output import one_line

__all__ = ["drop_stdout", "logs_to_stderr", "prepare_streams"]


class _Escaped(logging.Formatter):
    """``warning: message`` on one line; log messages quote names from files."""

    def format(self, record: logging.LogRecord) -> str:
        return one_line(f"{record.levelname.lower()}: {record.getMessage()}")


@contextmanager
def logs_to_stderr(*, debug: bool) -> Iterator[None]:
    """Show loadkit's warnings (with ``debug`` everything) on stderr while a command runs."""
    logger = logging.getLogger("loadkit")
    handler, level = logging.StreamHandler(sys.stderr), logger.level
    handler.setFormatter(_Escaped())
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if debug else logging.WARNING)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def prepare_streams() -> None:
    """Make stdout and stderr writable: a closed one leads nowhere, encodings lack nothing.

    A character that the terminal's encoding does not have is written as its escape.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - to the end
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def drop_stdout() -> None:
    """Lead stdout nowhere, so that the interpreter's last flush cannot fail as well."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
