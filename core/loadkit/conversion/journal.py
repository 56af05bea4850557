"""How far a conversion has come: a file that only grows, every line durable and checked.

A line is 16 hexadecimal digits (of the sha256 of what follows), a space, and JSON. The first line
says which conversion this is; each other one how far one file has come, with the sha256 of all its
bytes up to there. Lines after one that is cut or damaged do not count.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from loadkit.output_file import OutputFile

__all__ = ["JOURNAL", "Done", "Journal", "Mark", "read_journal"]

JOURNAL = ".loadkit-journal"
MAX_BYTES = 1 << 28  # of a journal; one line per 64 MiB or per file keeps far below


@dataclass(frozen=True, slots=True)
class Mark:
    """The first ``end`` bytes of a file are written; ``sha256`` is theirs."""

    end: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Done:
    """A file is whole and durable: ``identity`` is its inode, size and time of change.

    ``sha256`` is of all of it, ``tensors`` of each of its tensors.
    """

    sha256: str
    tensors: Mapping[str, str]
    identity: tuple[int, int, int]


@dataclass
class Progress:
    """What a journal says. ``marks`` by file, in the order they were made.

    Attributes:
        conversion: which conversion it is of; "" where the journal does not even say that.
        about: what its first line says besides, for people.
        size: bytes of the journal that count.
    """

    conversion: str = ""
    about: dict[str, Any] = field(default_factory=dict)
    marks: dict[str, list[Mark]] = field(default_factory=dict)
    done: dict[str, Done] = field(default_factory=dict)
    size: int = 0


def read_journal(folder: Path) -> Progress:
    """The journal in a hidden folder, as far as it is whole; an empty one where there is none.

    Raises:
        OSError: it cannot be read.
    """
    progress = Progress()
    try:
        fd = os.open(folder / JOURNAL, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return progress
    with os.fdopen(fd, "rb") as file:
        text = file.read(MAX_BYTES)
    for values, size in _lines(text):
        if not _take(progress, values):
            break
        progress.size = size
    return progress


def _lines(text: bytes) -> Iterator[tuple[dict[str, Any], int]]:
    """Every good line from the start, and where it ends."""
    at = 0
    while (end := text.find(b"\n", at)) >= 0:
        mark, _, body = text[at:end].partition(b" ")
        if mark != _checksum(body):
            return
        values = json.loads(body)
        if not isinstance(values, dict):
            return
        at = end + 1
        yield values, at


def _take(progress: Progress, values: dict[str, Any]) -> bool:
    """Note one line; False where it makes no sense."""
    try:
        if not progress.conversion:
            progress.conversion = str(values.pop("conversion"))
            progress.about = values
        elif "identity" in values:
            inode, size, changed = map(int, values["identity"])
            tensors = {str(name): str(one) for name, one in dict(values["tensors"]).items()}
            found = Done(str(values["sha256"]), tensors, (inode, size, changed))
            progress.done[str(values["file"])] = found
        else:
            mark = Mark(int(values["end"]), str(values["sha256"]))
            progress.marks.setdefault(str(values["file"]), []).append(mark)
    except (KeyError, TypeError, ValueError):
        return False
    return True


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest()[:16].encode()


class Journal:
    """A journal to write to; each line is durable when the call returns.

    Args:
        folder: the hidden folder.
        conversion: which conversion it is.
        about: more for its first line.
        keep: bytes of the journal that is there to go on after; 0: begin one.

    Raises:
        WriteError: the operating system refused.
    """

    def __init__(
        self, folder: Path, conversion: str, about: Mapping[str, Any], *, keep: int = 0
    ) -> None:
        self._path = folder / JOURNAL
        self._file = OutputFile(self._path, JOURNAL, keep=keep or None)
        if not keep:
            self._line({"conversion": conversion, **about})

    def mark(self, file: str, mark: Mark) -> None:
        """A file has come this far."""
        self._line({"file": file, "end": mark.end, "sha256": mark.sha256})

    def done(self, file: str, done: Done) -> None:
        """A file is whole and durable."""
        self._line(
            {
                "file": file,
                "identity": done.identity,
                "sha256": done.sha256,
                "tensors": dict(done.tensors),
            }
        )

    def _line(self, values: Mapping[str, Any]) -> None:
        body = json.dumps(values, separators=(",", ":")).encode()
        self._file.write(_checksum(body) + b" " + body + b"\n")
        self._file.sync()

    def remove(self) -> None:
        """It has served: nothing of it is in the result."""
        self._path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.__exit__(kind, error, trace)
