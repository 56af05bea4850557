"""A file that is elsewhere until it is fetched: reads are requests, small ones read ahead."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from loadkit.errors import ReadError, TruncatedError
from loadkit.file_checks import show
from loadkit.sources.base import File

if TYPE_CHECKING:
    from loadkit.sources.local_file import LocalFile

__all__ = ["BLOCK", "RemoteFile"]

BLOCK = 64 << 10  # bytes that a small read fetches
SMALL = 8 << 10  # bytes; larger reads fetch what they ask for
KEPT = 4  # blocks


class RemoteFile(File):
    """Reads by requests. ``become`` makes it a local file in place, after a download.

    Args:
        name: its name relative to the source's root.
        size: in bytes.
        fetch: fills a buffer with the bytes from an offset on; called from any thread.
    """

    def __init__(self, name: str, size: int, fetch: Callable[[int, memoryview], None]) -> None:
        self.name = name
        self.size = size
        self._fetch = fetch
        self._local: LocalFile | None = None
        self._blocks: OrderedDict[int, bytes] = OrderedDict()  # start of a block -> its bytes
        self._lock = threading.Lock()

    def become(self, local: LocalFile) -> None:
        """From now on it is a file of this machine.

        Raises:
            TruncatedError: that is of another size.
        """
        if local.size != self.size:
            raise TruncatedError(
                f"{show(self.name)} has {local.size} bytes here; its source says {self.size}",
                file=self.name,
                detail={"found": local.size, "expected": self.size},
                hint="remove it, and fetch it again",
            )
        self._local, self.path = local, local.path
        self._blocks.clear()

    def read(self, offset: int, nbytes: int) -> bytes:
        if self._local is not None:
            return self._local.read(offset, nbytes)
        self._check(offset, nbytes)
        with self._lock:
            known = self._known(offset, nbytes)
            if known is None and nbytes <= SMALL:
                block = bytearray(min(max(BLOCK, nbytes), self.size - offset))
                self._fetch(offset, memoryview(block))
                self._blocks[offset] = bytes(block)
                while len(self._blocks) > KEPT:
                    self._blocks.popitem(last=False)
                known = self._known(offset, nbytes)
        if known is not None and len(known) == nbytes:
            return known
        start = known or b""
        rest = bytearray(nbytes)
        rest[: len(start)] = start
        self._fetch(offset + len(start), memoryview(rest)[len(start) :])
        return bytes(rest)

    def _known(self, offset: int, nbytes: int) -> bytes | None:
        """The bytes from ``offset`` on that a block holds, ``nbytes`` at most."""
        for start, block in self._blocks.items():
            if start <= offset < start + len(block) or (nbytes == 0 and start == offset):
                self._blocks.move_to_end(start)
                return block[offset - start : offset - start + nbytes]
        return b"" if nbytes == 0 else None

    def read_into(self, offset: int, into: memoryview) -> None:
        if self._local is not None:
            into[:] = self._local.read(offset, len(into))
            return
        self._check(offset, len(into))
        if len(into):
            self._fetch(offset, into)

    def _check(self, offset: int, nbytes: int) -> None:
        if offset < 0 or nbytes < 0:
            raise ReadError(
                f"a read of {nbytes} bytes at {offset} of {show(self.name)} makes no sense",
                file=self.name,
            )
        if offset + nbytes > self.size:
            raise TruncatedError(
                f"{show(self.name)} ends early: {nbytes} bytes were asked for at byte {offset}, "
                f"{max(0, self.size - offset)} are there",
                file=self.name,
                offset=offset,
                detail={"asked": nbytes, "size": self.size},
            )

    def fileno(self) -> int:
        return super().fileno() if self._local is None else self._local.fileno()

    def identity(self) -> tuple[str, ...] | None:
        return None if self._local is None else self._local.identity()

    def check_unchanged(self) -> None:
        """A remote file is held against its first answer by every read."""
        if self._local is not None:
            self._local.check_unchanged()

    def close(self) -> None:
        if self._local is not None:
            self._local.close()

    def __repr__(self) -> str:
        where = "remote" if self._local is None else "local"
        return f"RemoteFile({self.name!r}, {self.size} bytes, {where})"
