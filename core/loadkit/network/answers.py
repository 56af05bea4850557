"""What a transport is: one attempt at a range of a file, and the ways in which it can fail."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadkit.closing import Closing
from loadkit.errors import DownloadError
from loadkit.file_checks import show

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from loadkit.network.patience import Deadline

__all__ = ["Absent", "Answer", "Denied", "Pin", "Transient", "Transport", "changed", "wrong"]


@dataclass(frozen=True, slots=True)
class Pin:
    """Which content of a file was seen first; every later answer has to be of the same.

    ``size`` in bytes. ``etag`` as the server spells it, ``modified`` as it dates it; None where it
    says nothing: then only the size tells.
    """

    size: int
    etag: str | None = None
    modified: str | None = None

    @property
    def strong(self) -> str | None:
        """The ETag, if equal ETags mean equal bytes."""
        return self.etag if self.etag and not self.etag.startswith("W/") else None


class Transient(Exception):  # noqa: N818 - what failed, not an error of ours
    """An attempt failed in a way that may pass. Its text holds no secret.

    Attributes:
        retry_after: seconds that the server asks to wait.
        unreached: the server was not reached at all.
        status: of the answer, if there was one.
    """

    def __init__(
        self,
        text: str,
        *,
        retry_after: float | None = None,
        unreached: bool = False,
        status: int | None = None,
    ) -> None:
        super().__init__(text)
        self.retry_after = retry_after
        self.unreached = unreached
        self.status = status


class Absent(Exception):  # noqa: N818
    """There is no such file."""


class Denied(Exception):  # noqa: N818
    """The credentials, or the lack of them, do not open this file. Its text holds no secret."""


class Answer(Closing, ABC):
    """The bytes ``start`` to ``end`` of a file as they arrive; a context manager."""

    def __init__(self, pin: Pin, start: int, end: int) -> None:
        self.pin = pin
        self.start = start
        self.end = end

    @abstractmethod
    def pieces(self) -> Iterator[Buffer]:
        """The bytes in order, exactly ``end - start`` of them.

        Raises:
            Transient: they stop early or late.
        """

    @abstractmethod
    def close(self) -> None:
        """Let the connection go."""


class Transport(ABC):
    """A way to the files of one source. Every method may be called from several threads."""

    @abstractmethod
    def get(self, name: str, start: int, end: int, pin: Pin | None, deadline: Deadline) -> Answer:
        """One attempt at the bytes ``start`` to ``end``; fewer where the file ends before.

        Args:
            name: the file, relative to the root.
            start, end: at least one byte.
            pin: what the file has to be; None: it is seen for the first time.
            deadline: no attempt waits longer.

        Raises:
            Transient, Absent, Denied: see there.
            DownloadError: the answer is wrong, or of another content.
        """

    def refresh(self) -> bool:
        """Get new credentials, if there is a way to; whether there is."""
        return False

    @abstractmethod
    def shown(self, name: str) -> str:
        """A file's address without secrets."""

    def address(self, name: str) -> str | None:
        """What other programs call a file, if that says all that is needed: no secret is in it."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Close every connection."""


def changed(name: str, offset: int, what: str) -> DownloadError:
    """The error of a file that is not what it was when it was first seen."""
    return DownloadError(
        f"{show(name)} changed while it was read: {what}",
        file=name,
        offset=offset,
        detail={"changed": True},
        hint="load again when nothing writes to the checkpoint",
    )


def wrong(name: str, what: str, offset: int | None = None) -> DownloadError:
    """The error of an answer that cannot be used; ``name`` is "" where no file was asked for."""
    return DownloadError(
        f"the server answered {f'the request for {show(name)}' if name else 'a request'} with "
        f"{what}",
        file=name or None,
        offset=offset,
        hint="the server, or something between it and here, does not keep to HTTP",
    )
