"""A file of a server: its begin can be read at once, the rest when the whole of it has come."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from loadkit.errors import ReadError, TruncatedError
from loadkit.file_checks import show
from loadkit.sources.base import File

if TYPE_CHECKING:
    from collections.abc import Callable

    from loadkit.sources.local_file import LocalFile

__all__ = ["ServedFile"]

MOST = 128 << 20  # bytes of a begin that is kept: headers are smaller
STEP = 64 << 10  # bytes that the first read fetches


class ServedFile(File):
    """Reads near the begin fetch the begin: the protocol sends files from there on, or not at all.

    Args:
        name: its name relative to the source's root.
        size: in bytes.
        start: gives so many first bytes or more.
    """

    def __init__(self, name: str, size: int, start: Callable[[int], bytes]) -> None:
        self.name = name
        self.size = size
        self._start = start
        self._known = b""
        self._local: LocalFile | None = None
        self._lock = threading.Lock()

    def become(self, local: LocalFile) -> None:
        """From now on it is a file of this machine.

        Raises:
            TruncatedError: that is of another size, or does not begin as this one did.
        """
        seen = self._known
        if local.size != self.size or local.read(0, len(seen)) != seen:
            raise TruncatedError(
                f"{show(self.name)} on the disk is not what the server listed or began with",
                file=self.name,
                detail={"found": local.size, "expected": self.size},
                hint="remove it, and load again",
            )
        self._local, self.path, self._known = local, local.path, b""

    def read(self, offset: int, nbytes: int) -> bytes:
        if self._local is not None:
            return self._local.read(offset, nbytes)
        end = offset + nbytes
        if offset < 0 or nbytes < 0:
            raise ReadError(
                f"a read of {nbytes} bytes at {offset} of {show(self.name)} makes no sense",
                file=self.name,
            )
        if end > self.size:
            raise TruncatedError(
                f"{show(self.name)} ends early: {nbytes} bytes were asked for at byte {offset}, "
                f"{max(0, self.size - offset)} are there",
                file=self.name,
                offset=offset,
                detail={"asked": nbytes, "size": self.size},
            )
        if end > MOST:
            raise ReadError(
                f"byte {offset} of {show(self.name)} is not here: a ModelExpress server sends "
                "whole files, and this one was not fetched",
                file=self.name,
                offset=offset,
                hint="load it: a load fetches the files that it reads",
            )
        with self._lock:
            if len(self._known) < end:
                self._known = self._start(min(self.size, max(end, STEP)))
            return self._known[offset:end]

    def fileno(self) -> int:
        return super().fileno() if self._local is None else self._local.fileno()

    def identity(self) -> tuple[str, ...] | None:
        return None if self._local is None else self._local.identity()

    def check_unchanged(self) -> None:
        """What was only begun is held against the commit by every call."""
        if self._local is not None:
            self._local.check_unchanged()

    def close(self) -> None:
        if self._local is not None:
            self._local.close()

    def __repr__(self) -> str:
        where = "on the server" if self._local is None else "here"
        return f"ServedFile({self.name!r}, {self.size} bytes, {where})"
