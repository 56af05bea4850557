"""Transfers: ranges of files, tried again and gone on with until they are there or it is enough."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING

from loadkit.errors import DownloadError, ReadError
from loadkit.file_checks import show
from loadkit.network.answers import Absent, Denied, Pin, Transient, Transport
from loadkit.network.patience import Deadline, Retries

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from loadkit.config import LoadConfig

__all__ = ["Transfers"]


class Transfers:
    """What one source fetches, and how much it was.

    Attributes:
        nbytes: bytes of files that arrived, those of attempts that failed included.
    """

    def __init__(self, transport: Transport, load_config: LoadConfig) -> None:
        self.transport = transport
        self._seconds = load_config.network_deadline
        self._lock = threading.Lock()
        self._refreshes = 0
        self.nbytes = 0

    def first(self, name: str, nbytes: int) -> tuple[Pin, bytes]:
        """What a file is, and its first bytes, at least ``nbytes`` unless it is shorter.

        Raises:
            ReadError: ENOENT, there is no such file.
            DownloadError: as ``fetch``.
        """
        pieces: list[bytes] = []
        pin = self.fetch(name, 0, nbytes, None, lambda piece: pieces.append(bytes(piece)))
        return pin, b"".join(pieces)

    def fetch(
        self,
        name: str,
        start: int,
        end: int,
        pin: Pin | None,
        take: Callable[[Buffer], object],
    ) -> Pin:
        """Hand the bytes ``start`` to ``end`` of a file to ``take``, in order, each once.

        What breaks off is gone on with where it broke off, as long as the file is the same.

        Args:
            name: the file, relative to the root.
            start, end: cut to the file's size.
            pin: what the file has to be; None: it is seen for the first time.
            take: gets pieces; it must be done with one when it returns.

        Returns:
            What the file is.

        Raises:
            ReadError: ENOENT, there is no such file.
            DownloadError: E_DOWNLOAD, E_TIMEOUT, E_AUTH or E_OFFLINE.
        """
        deadline = Deadline(self._seconds)
        retries = Retries(self.transport.shown(name), name, deadline)
        at, refreshed = start, -1
        while pin is None or at < min(end, pin.size):
            stop = end if pin is None else min(end, pin.size)
            seen = self._refreshes
            try:
                with self.transport.get(name, at, stop, pin, deadline) as answer:
                    with closing(answer.pieces()) as pieces:  # type: ignore[type-var]
                        for piece in pieces:
                            take(piece)
                            nbytes = memoryview(piece).nbytes
                            at += nbytes
                            pin = answer.pin
                            self.count(nbytes)
                            retries.progressed(nbytes)
                    pin, end = answer.pin, max(min(end, answer.pin.size), at)
            except Transient as error:
                retries.failed(error, at)
            except Absent:
                raise self._absent(name) from None
            except Denied as error:
                if refreshed == seen or not self._refresh(seen):
                    raise self.denied(name, error, at) from None
                refreshed = self._refreshes
        return pin

    def count(self, nbytes: int) -> None:
        """Add bytes that arrived."""
        with self._lock:
            self.nbytes += nbytes

    def _refresh(self, seen: int) -> bool:
        """New credentials, unless another thread got some since; whether there are."""
        with self._lock:
            if self._refreshes != seen:
                return True
            if not self.transport.refresh():
                return False
            self._refreshes += 1
            return True

    def _absent(self, name: str) -> ReadError:
        return ReadError(
            f"there is no {show(self.transport.shown(name))}",
            errno=errno.ENOENT,
            file=name,
            hint="see that the address is right",
        )

    def denied(self, name: str, error: Denied, offset: int) -> DownloadError:
        """The error of credentials that do not open a file, or a listing (name "")."""
        again = ", also with fresh credentials" if self._refreshes else ""
        return DownloadError(
            f"{show(self.transport.shown(name))} is not open to these credentials: {error}{again}",
            code="E_AUTH",
            file=name or None,
            offset=offset if name else None,
            hint="see that there are any, that they are right and not expired, and that this "
            "machine's clock is right",
        )
