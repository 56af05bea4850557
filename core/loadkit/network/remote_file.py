"""A file that is elsewhere until it is fetched: small reads bring a block, large ones do not."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from loadkit.errors import ReadError, TruncatedError
from loadkit.file_checks import show
from loadkit.network.answers import Pin
from loadkit.network.transfer import Transfers
from loadkit.sources.base import File

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from loadkit.sources.local_file import LocalFile

__all__ = ["BLOCK", "RemoteFile"]

BLOCK = 64 << 10  # bytes of the start, and what a small read asks for
KEPT = 4  # blocks beside the start


class RemoteFile(File):
    """A file of a remote source. Every answer is of the content that ``pin`` names, or an error.

    ``become`` makes it a local file in place, after a download.

    Args:
        name: relative to the source's root.
        pin: what it is.
        head: its first bytes, as many as are there already.
        transfers: the source's.
    """

    def __init__(self, name: str, pin: Pin, head: bytes, transfers: Transfers) -> None:
        self.name = name
        self.pin = pin
        self.size = pin.size
        self.address = transfers.transport.address(name)
        self._head = head
        self._blocks: OrderedDict[int, bytes] = OrderedDict()  # start of a block -> its bytes
        self._transfers = transfers
        self._lock = threading.Lock()
        self._local: LocalFile | None = None

    def read(self, offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` bytes from ``offset``.

        Raises:
            TruncatedError: the file ends earlier. Nothing is asked for.
            DownloadError: the server, or the way to it, failed.
        """
        if self._local is not None:
            return self._local.read(offset, nbytes)
        self._check(offset, nbytes)
        with self._lock:
            known = self._known(offset)
            start, left = offset + len(known), nbytes - len(known)
            if 0 < left < BLOCK:
                ahead = self._fetch(start, min(self.size, start + BLOCK))
                self._keep(start, ahead)
                return known + ahead[:left]
        if left <= 0:
            return known[:nbytes]
        return known + self._fetch(start, start + left)

    def _known(self, offset: int) -> bytes:
        """The bytes from ``offset`` on that are here already."""
        if offset < len(self._head):
            return self._head[offset:]
        for start, block in self._blocks.items():
            if start <= offset < start + len(block):
                self._blocks.move_to_end(start)
                return block[offset - start :]
        return b""

    def _keep(self, start: int, block: bytes) -> None:
        if start == len(self._head) == 0:
            self._head = block
            return
        self._blocks[start] = block
        while len(self._blocks) > KEPT:
            self._blocks.popitem(last=False)

    def _fetch(self, start: int, end: int) -> bytes:
        pieces: list[bytes] = []
        self._transfers.fetch(self.name, start, end, self.pin, lambda p: pieces.append(bytes(p)))
        return b"".join(pieces)

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` as bytes arrive: no copy of the range is kept."""
        if self._local is not None:
            super().read_into(offset, into)
            return
        self._check(offset, len(into))
        at = 0

        def take(piece: Buffer) -> None:
            nonlocal at
            nbytes = memoryview(piece).nbytes
            into[at : at + nbytes] = piece
            at += nbytes

        self._transfers.fetch(self.name, offset, offset + len(into), self.pin, take)

    def _check(self, offset: int, nbytes: int) -> None:
        if offset < 0 or nbytes < 0:
            problem = f"a read of {nbytes} bytes at {offset} of {show(self.name)} makes no sense"
            raise ReadError(problem, file=self.name)
        if offset + nbytes > self.size:
            raise TruncatedError(
                f"{show(self.name)} ends early: {nbytes} bytes were asked for at byte {offset}, it "
                f"has {self.size}",
                file=self.name,
                offset=offset,
                detail={"asked": nbytes, "size": self.size},
                hint="what was uploaded is incomplete",
            )

    def came(self, nbytes: int) -> None:
        self._transfers.count(nbytes)

    def become(self, local: LocalFile) -> None:
        """From now on it is a file of this machine.

        Raises:
            ReadError: that is of another size.
        """
        if local.size != self.size:
            local.close()
            raise ReadError(
                f"{show(self.name)} has {local.size} bytes here; its source says {self.size}",
                file=self.name,
                detail={"found": local.size, "expected": self.size},
                hint="something else writes there; remove it, and fetch it again",
            )
        self._local, self.path = local, local.path
        self._head, self._blocks = b"", OrderedDict()

    def fileno(self) -> int:
        return super().fileno() if self._local is None else self._local.fileno()

    def identity(self) -> tuple[str, ...] | None:
        """The downloaded file's; else its address and what the server calls this content."""
        if self._local is not None:
            return self._local.identity()
        if self.pin.strong is None:
            return None
        return self._transfers.transport.shown(self.name), self.pin.strong, str(self.size)

    def check_unchanged(self) -> None:
        """A downloaded file as any local one; else every answer was held against the first."""
        if self._local is not None:
            self._local.check_unchanged()

    def close(self) -> None:
        if self._local is not None:
            self._local.close()

    def __repr__(self) -> str:
        where = "remote" if self._local is None else "local"
        return f"RemoteFile({self.name!r}, {self.size} bytes, {where})"
