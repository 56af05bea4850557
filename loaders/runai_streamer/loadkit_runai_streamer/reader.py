"""The reader ``runai``: ranges of files straight into parameters, by the Run:ai model streamer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from loadkit.errors import DownloadError, LoadkitError, ReadError
from loadkit.options import OptionSpec
from loadkit.readers.library import BUFFER, LibraryReader
from loadkit.readers.ranges import SPAN, Range, refused
from loadkit.streamer_options import STREAMER_READER_OPTIONS
from loadkit.text import printable
from loadkit_runai_streamer.streamer import Streamer, knows

if TYPE_CHECKING:
    from loadkit.config import LoadConfig
    from loadkit.sources.base import File

__all__ = ["RunaiReader"]

LIBRARY = "the Run:ai model streamer"


class RunaiReader(LibraryReader):
    """One streamer for all reads, from the first one until ``close`` or an error.

    ``concurrency`` (else ``LoadConfig.num_threads``, else the streamer's own default) is its
    number of requests under way, ``memory_limit`` the bytes of the buffer that rows with gaps go
    through. Everything else lands where it belongs.
    """

    name: ClassVar[str] = "runai"
    joins: ClassVar[bool] = True
    options: ClassVar[Mapping[str, OptionSpec]] = STREAMER_READER_OPTIONS

    def __init__(self, load_config: LoadConfig) -> None:
        chosen = self.options_of(load_config)
        super().__init__(load_config, _buffer_bytes(chosen["memory_limit"]))
        self._streamer = Streamer(chosen["concurrency"] or load_config.num_threads or None)
        self._remote: dict[int, File] = {}

    def reads_remote(self, file: File) -> bool:
        """Files of object stores that the streamer has a plugin for."""
        return file.address is not None and knows(file.address)

    def fetch(self, wanted: Sequence[Range], landed: Callable[[int], None]) -> None:
        """One submission. After an error the streamer is ended, which waits for what it began."""
        paths: dict[int, str] = {}
        for item in wanted:
            if id(item.file) not in paths:
                paths[id(item.file)] = _path(item)
                if not item.file.local:
                    self._remote[id(item.file)] = item.file
        try:
            for item, failure in self._streamer.answers(wanted, paths):
                if failure is not None:
                    raise _error(item, failure, wanted)
                if not item.file.local:
                    item.file.came(item.nbytes)
                landed(item.nbytes)
        except BaseException:
            self._streamer.end()
            raise

    def end(self, landed: Callable[[int], None] | None = None) -> int:
        """Hold remote files against what they were when they were opened, by a byte of each.

        Raises:
            ReadFailure: one is another file now, or that cannot be asked.
        """
        for file in self._remote.values():
            file.read_into(file.size - 1, memoryview(bytearray(1)))
        return super().end(landed)

    def close(self) -> None:
        """End the streamer's threads and let the buffer go."""
        self._streamer.end()
        super().close()


def _buffer_bytes(limit: int | None) -> int:
    """The size of the buffer for a ``memory_limit``."""
    if limit is None or limit < 0:
        return BUFFER
    return max(SPAN, min(limit, BUFFER))


def _path(item: Range) -> str:
    """What the streamer calls a file."""
    file = item.file
    path = file.path or file.address
    try:
        (path or "").encode("utf-8")
    except UnicodeEncodeError:
        path = None
    if not path:
        raise ReadError(
            f"{printable(file.name)} has no name that {LIBRARY} can be given",
            file=file.name,
            tensor=item.extent.tensor,
            offset=item.offset,
            hint="choose the reader 'auto'",
        )
    return path


def _error(item: Range, said: str, wanted: Sequence[Range]) -> LoadkitError:
    """What is wrong with a range: what our own read of it says, else what the streamer did."""
    found = refused(item, LIBRARY, said, together=wanted)
    if item.file.local or not isinstance(found, ReadError):
        return found
    return DownloadError(
        f"reading tensor {printable(item.extent.tensor)} from {printable(item.file.name)} at byte "
        f"{item.offset} failed: {LIBRARY} says: {printable(said)}",
        file=item.file.name,
        tensor=item.extent.tensor,
        offset=item.offset,
        hint="the streamer takes its endpoint and credentials from the environment "
        "(AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, ...); without stream=true files are fetched first",
    )
