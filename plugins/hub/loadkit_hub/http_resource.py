"""One file behind an HTTP address: exact ranges of it, held against what it was at first."""

from __future__ import annotations

import http.client
import logging
import re
from collections.abc import Callable

from loadkit.errors import DownloadError
from loadkit.file_checks import show
from loadkit_hub.http_client import HttpClient, Response, reason
from loadkit_hub.patience import Patience

__all__ = ["HttpResource", "etag_of"]

logger = logging.getLogger(__name__)

ATTEMPTS = 8  # without a byte in between
_RANGE = re.compile(r"bytes (\d{1,20})-(\d{1,20})/(\d{1,20}|\*)")
_ETAG = re.compile(r'(?:W/)?"[\x21\x23-\x7e\x80-\xff]{1,256}"')


def etag_of(headers: dict[str, str]) -> str | None:
    """A strong ETag; None without one, or with one that cannot be."""
    value = headers.get("etag", "")
    return value if _ETAG.fullmatch(value) and not value.startswith("W/") else None


class HttpResource:
    """Reads ranges of one address.

    Args:
        client: sends the requests.
        url: where the file is; a redirect to a signed address is remembered until it is refused.
        name: the file's name, for errors.
        size: its size in bytes, as a listing or a HEAD told.
        patience: makes the deadline of one transfer.
        refused: the error for a status that is neither 200 nor 206.
        check: looks at the first answer (its own and the hops' headers); raises if it is wrong.
        arrived: told the number of bytes that came, from any thread.
    """

    def __init__(
        self,
        client: HttpClient,
        url: str,
        name: str,
        size: int,
        patience: Callable[[str], Patience],
        refused: Callable[[Response, str], BaseException],
        check: Callable[[Response], None] | None = None,
        arrived: Callable[[int], None] | None = None,
    ) -> None:
        self.client, self.url, self.name, self.size = client, url, name, size
        self._patience, self._refused, self._check = patience, refused, check
        self._arrived = arrived
        self._found: tuple[str, str | None] | None = None  # where it really is, and its ETag there

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` from ``offset`` on; a broken connection goes on where it broke.

        Raises:
            DownloadError: the server answers wrong, not at all or too late, or has another file
                than at first.
        """
        done = 0

        def take(data: bytes) -> None:
            nonlocal done
            into[done : done + len(data)] = data
            done += len(data)

        self.stream(offset, offset + len(into), take)

    def stream(self, start: int, end: int, take: Callable[[bytes], None]) -> None:
        """Hand over the bytes from ``start`` to before ``end``, in order and each once.

        Raises:
            LoadkitError: as ``read_into``; whatever ``take`` raises.
        """
        patience = self._patience(f"{show(self.name)}, bytes {start} to {end}")
        at, renewed = start, False
        while at < end:
            response = self._ask(at, end, patience)
            signed = self._found is not None or bool(response.hops)
            if response.status in (401, 403, 410) and signed and not renewed:
                response.close()  # a signed address may have expired: ask for another, once
                self._found, renewed = None, True
                continue
            try:
                self._accept(response, at, end)
                while at < end:
                    data = self._some(response, end - at, patience)
                    if not data:
                        break
                    take(data)
                    at += len(data)
                    renewed = False
            finally:
                response.close()

    def _some(self, response: Response, most: int, patience: Patience) -> bytes:
        """Bytes as they come; none where the connection broke, after a pause."""
        try:
            data = response.read(min(most, 1 << 20), patience)
        except (OSError, http.client.HTTPException) as error:
            patience.pause(reason(error), most=ATTEMPTS)
            return b""
        if not data:
            patience.pause("the connection was cut", most=ATTEMPTS)
        elif self._arrived is not None:
            self._arrived(len(data))
        return data

    def _ask(self, at: int, end: int, patience: Patience) -> Response:
        url, etag = self._found or (self.url, None)
        headers = {"Range": f"bytes={at}-{end - 1}"}
        if etag is not None:
            headers["If-Match"] = etag
        return self.client.get(url, patience, headers)

    def _accept(self, response: Response, at: int, end: int) -> None:
        """Hold an answer against what was asked."""
        if response.status == 412:
            raise self._changed("the server has another version of it")
        if response.status not in (200, 206):
            raise self._refused(response, self.name)
        if response.status == 200 and (at, end) != (0, self.size):
            raise self._wrong("the server sends the whole file where a range was asked for")
        if response.status == 206:
            given = response.headers.get("content-range", "")
            match = _RANGE.fullmatch(given)
            if match is None or (int(match[1]), int(match[2])) != (at, end - 1):
                raise self._wrong(f"bytes {at}-{end - 1} were asked for, {show(given)} came")
            if match[3] != "*" and int(match[3]) != self.size:
                raise self._changed(f"it has {match[3]} bytes now, not {self.size}")
        if response.left is not None and response.left != end - at:
            raise self._wrong(f"{end - at} bytes were asked for, {response.left} are announced")
        etag = etag_of(response.headers)
        if self._found is None:
            if self._check is not None:
                self._check(response)
            self._found = (response.url, etag)
        elif self._found[1] is not None and etag is not None and etag != self._found[1]:
            raise self._changed("its ETag is another one")

    def _wrong(self, what: str) -> DownloadError:
        return DownloadError(
            f"{show(self.name)}: {what}",
            file=self.name,
            hint="the server, or a proxy before it, is at fault",
        )

    def _changed(self, what: str) -> DownloadError:
        return DownloadError(
            f"{show(self.name)} changed while it was read: {what}",
            file=self.name,
            hint="load again when nothing writes to it",
        )
