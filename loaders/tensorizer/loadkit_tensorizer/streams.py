"""What the library reads from: a file of a source, or a URI, with every byte accounted for.

``CheckedStream`` stands between the library and the bytes. The head of the file comes from memory,
where it was checked; each tensor's header is checked as it passes, before the library allocates
what it says; a read that comes short is an error.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from typing import Any

from loadkit.errors import DownloadError, TruncatedError
from loadkit.file_checks import show
from loadkit.sources.base import File
from loadkit_tensorizer.entries import Index
from loadkit_tensorizer.library import library, reading_errors
from loadkit_tensorizer.tensor_header import header_length, parse_tensor_header

__all__ = ["CheckedStream", "StreamedFile", "open_uri"]

_SOME = 1 << 16  # bytes that are kept of a stream's begin, at least


class StreamedFile(File):
    """A URI as a file: read forward, through the library's own client.

    Args:
        name: the URI, as it may be shown.
        connect: opens the stream at its begin.
    """

    def __init__(self, name: str, connect: Callable[[], Any]) -> None:
        self.name = name
        self._connect = connect
        self._lock = threading.Lock()
        with reading_errors(name, remote=True):
            self._stream: Any = connect()
        length = getattr(self._stream, "response_headers", {}).get("content-length")
        if length is None or not length.isdecimal():
            self.close()
            raise DownloadError(
                f"the server does not say how long {show(name)} is",
                file=name,
                hint="download the file, and load it from there",
            )
        self.size = int(length)
        self._head = b""

    def read(self, offset: int, nbytes: int) -> bytes:
        """Exactly these bytes; cheap only forward, and at the begin.

        Raises:
            TruncatedError: the stream ends earlier.
            DownloadError: the server, or the way to it, failed.
        """
        into = bytearray(nbytes)
        self.read_into(offset, memoryview(into))
        return bytes(into)

    def read_into(self, offset: int, into: memoryview) -> None:
        if offset + len(into) > self.size:
            raise _short(self.name, self.size, offset)
        with self._lock, reading_errors(self.name, remote=True):
            if offset + len(into) <= len(self._head):
                into[:] = self._head[offset : offset + len(into)]
                return
            if self._stream is None:
                self._stream = self._connect()
            if offset < len(self._head) == self._stream.tell():  # goes on where the head ends
                done = len(self._head) - offset
                into[:done] = self._head[offset:]
                offset, into = offset + done, into[done:]
            if offset < self._stream.tell():  # from the begin: not every server knows ranges
                self.close()
                self._stream = self._connect()
            self._stream.seek(offset)
            at = 0
            while at < len(into):
                count = self._stream.readinto(into[at:])
                if not count:
                    raise _short(self.name, self.size, offset + at)
                at += count
            if offset == len(self._head) and offset < _SOME:
                self._head += bytes(into)

    def check_unchanged(self) -> None:
        """One stream is of one content."""

    def release(self) -> None:
        """Let go of the connection; the next read makes another one."""
        with self._lock:
            self.close()

    def close(self) -> None:
        """Let go of the connection."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


def open_uri(uri: str, name: str, extra: Any) -> StreamedFile:
    """Open a URI with the library's client.

    Args:
        uri: ``s3``, ``http`` or ``https``.
        name: the same, as it may be shown.
        extra: the loader's options.

    Raises:
        NotInstalledError: the library is missing.
        DownloadError: it cannot be opened.
    """
    client = library("tensorizer.stream_io")
    options: dict[str, Any] = {}
    if uri.lower().startswith("s3://"):
        for key in ("s3_access_key_id", "s3_secret_access_key", "s3_endpoint"):
            options[key] = extra[key]
        endpoint = str(options["s3_endpoint"] or "")
        options["force_http"] = True if endpoint.startswith("http://") else None
    return StreamedFile(name, lambda: client.open_stream(uri, "rb", **options))


class CheckedStream(io.BufferedIOBase):
    """A file for the library to read: forward, exactly, and checked.

    Args:
        index: of the file, checked; only its tensors are read.
        verify: refuse tensors without a hash.
    """

    def __init__(self, index: Index, *, verify: bool) -> None:
        super().__init__()
        self._index, self._verify = index, verify
        self._file = index.file
        self._at = 0
        self._entries = {entry.offset: entry for entry in index.entries}
        self._lengths = {entry.offset + 8: entry for entry in index.entries}
        self._first = index.entries[0].offset

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def read(self, size: int | None = -1, /) -> bytes:
        left = self._file.size - self._at
        data = self._take(left if size is None or size < 0 else size)
        entry = self._entries.get(self._at)
        if entry is not None and len(data) == 8:
            header_length(self._index, entry, data)
        self._at += len(data)
        return data

    def readinto(self, buffer: Any, /) -> int:
        into = memoryview(buffer).cast("B")
        entry = self._lengths.get(self._at)
        if entry is not None:  # the header behind its length
            length = (entry.start - entry.offset).to_bytes(8, "little")
            into[:] = self._take(len(into))
            parse_tensor_header(self._index, entry, length + bytes(into), verify=self._verify)
        else:
            self._file.read_into(self._at, into)
        self._at += len(into)
        return len(into)

    def _take(self, nbytes: int) -> bytes:
        """Bytes of the head from memory, and of the rest from the file."""
        if self._at + nbytes <= self._first:
            return self._index.head[self._at : self._at + nbytes]
        return self._file.read(self._at, nbytes)

    def close(self) -> None:
        """The file stays open: it is its owner's."""


def _short(name: str, size: int, offset: int) -> TruncatedError:
    return TruncatedError(
        f"{show(name)} is cut off at byte {offset}; it was to have {size} bytes",
        file=name,
        offset=offset,
        hint="fetch it again",
    )
