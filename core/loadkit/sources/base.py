"""What a source is: a place that holds a checkpoint's files, and one open file of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from loadkit.closing import Closing
from loadkit.errors import UsageError

if TYPE_CHECKING:
    from loadkit.config import LoadConfig


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file that a source holds: ``name`` relative to the root with "/", ``size`` in bytes.

    ``sha256``: of its content, in hex, where the source knows it from elsewhere (a hub); else None.
    """

    name: str
    size: int
    sha256: str | None = None


class File(ABC):
    """One open, readable file. ``name`` is relative to its source's root; ``size`` in bytes.

    ``path`` is its local path, or None where it has none (a remote file). ``address`` is where a
    remote file is, as other programs name it (``s3://bucket/key``); None where nothing names it.
    ``reader`` is the name of the one reader that reads it; "" where any of its kind does.

    A remote file's ``read`` is a request, with a block read ahead where little is asked for.
    """

    name: str
    size: int
    path: str | None = None
    address: str | None = None
    reader: ClassVar[str] = ""

    @property
    def local(self) -> bool:
        """Whether it lies on this machine and has a descriptor."""
        return self.path is not None

    @abstractmethod
    def read(self, offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` bytes from ``offset``.

        Raises:
            TruncatedError: the file ends earlier.
            ReadError: the operating system or the network failed.
        """

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes from ``offset`` on; may be called from several threads.

        Raises:
            LoadkitError: as ``read``.
        """
        into[:] = self.read(offset, len(into))

    def came(self, nbytes: int) -> None:  # noqa: B027
        """Count bytes of a remote file that a reader fetched by itself, without ``read``."""

    def fileno(self) -> int:
        """An open descriptor, for local files. It stays open until ``close``."""
        raise NotImplementedError(f"{type(self).__name__} has no file descriptor")

    def identity(self) -> tuple[str, ...] | None:
        """What names this very content for as long as nobody writes; None where nothing does."""
        return None

    @abstractmethod
    def check_unchanged(self) -> None:
        """Raise ChangedError if the file is not what it was when it was opened."""

    @abstractmethod
    def close(self) -> None:
        """Release the descriptor or connection; may be called twice."""


class Source(Closing, ABC):
    """A checkpoint's place, one per URI scheme. Registered with ``@register_source(scheme)``.

    A source is a context manager; leaving it closes every file it opened.

    Attributes:
        load_options: fields of ``LoadConfig`` that not every load follows and this source does
            (``revision``, ``stream``); others are refused where they are set.
        uri: what was opened, as it may be shown: without passwords and signatures.
        bytes_fetched: bytes of files that came over a network so far; those of listings not.
        remarks: sentences for a plan's notes and a report's warnings.
    """

    load_options: ClassVar[frozenset[str]] = frozenset()
    bytes_fetched: int = 0

    def __init__(self, uri: str, load_config: LoadConfig) -> None:
        self.uri = uri
        self.load_config = load_config
        self.remarks: list[str] = []

    @abstractmethod
    def list(self) -> Sequence[FileInfo]:
        """Every regular file under the root, sorted by name (sub-folders included, two levels)."""

    @abstractmethod
    def open(self, name: str) -> File:
        """Open a file by its name relative to the root; the same File for the same name.

        Raises:
            PathError: the name leads out of the root, or is no regular file.
            ReadError: it cannot be opened.
        """

    def opened(self) -> Sequence[File]:
        """The files that were opened so far: weights, and whatever else was asked for."""
        return ()

    def make_local(self, names: Sequence[str]) -> None:
        """Have these files on this machine before they are read, unless ``stream`` says not to.

        Called by a load, once its files are known, and never by a plan. A file that is open
        already becomes ``local`` in place. A local source has nothing to do.

        Raises:
            DownloadError: the server, or the way to it, failed.
            WriteError: there is no room, or no right to write.
        """

    def adopt(self, file: File) -> None:
        """Take over an open file that lies elsewhere (a cache): it is opened by its name from now
        on, and closed with the others.

        Raises:
            UsageError: the source takes none.
        """
        raise UsageError(
            f"{type(self).__name__} takes no files of a cache: download the checkpoint first"
        )

    @abstractmethod
    def close(self) -> None:
        """Close every file this source opened."""
