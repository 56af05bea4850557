"""Ranges of files on a web server. Every answer is held against what was asked and seen before."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadkit.errors import DownloadError
from loadkit.file_checks import show
from loadkit.network.answers import Absent, Answer, Denied, Pin, Transient, Transport, changed
from loadkit.network.http_rules import check_same, conditions, content_range, pin_of, unencoded
from loadkit.sources.shown import shown_source

if TYPE_CHECKING:
    from loadkit.network.http_client import HttpClient, Reply
    from loadkit.network.patience import Deadline

__all__ = ["HttpTransport"]

PIECE = 1 << 20  # bytes taken from a connection at once, at most
SMALL = 64 << 10  # bytes; a first look that gets a whole file takes one up to here
_EXPIRED = (401, 403, 410)  # what signed addresses answer when their time is over


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a file really is, by what redirects told, and what it is there."""

    url: str
    pin: Pin


class HttpTransport(Transport):
    """Files by their addresses. Where a redirect led is remembered until it fails or is refused.

    Args:
        client: sends the requests; closed with the transport.
    """

    def __init__(self, client: HttpClient) -> None:
        self.client = client
        self._places: dict[str, _Place] = {}

    @abstractmethod
    def url_of(self, name: str) -> str:
        """The address of a file, secrets and all."""

    def check(self, name: str, reply: Reply) -> None:
        """Look at an answer that a file's own address led to; raises if it is wrong."""

    def refusal(self, name: str, reply: Reply, start: int) -> Exception:
        """What a status that is no success means, for the request of a file's byte ``start``."""
        if reply.status in (401, 403):
            return Denied(f"the server answered {reply.status}")
        if reply.status in (404, 410):
            return Absent(name)
        return DownloadError(
            f"the server answered {reply.status} to the request for {show(name)}",
            file=name,
            offset=start,
            detail={"status": reply.status},
        )

    def shown(self, name: str) -> str:
        return shown_source(self.url_of(name))

    def get(self, name: str, start: int, end: int, pin: Pin | None, deadline: Deadline) -> Answer:
        own = self.url_of(name)
        seen, reply = self._reply(name, own, (start, end), pin, deadline)
        try:
            found, start, end = self._accepted(name, reply, start, end, seen)
            if reply.hops or reply.url == own:  # its own address was asked
                self.check(name, reply)
                known = self._places.get(name)
                self._places[name] = _Place(reply.url, known.pin if known else found)
        except BaseException:
            reply.close()
            raise
        return _HttpAnswer(pin or found, start, end, reply)

    def _reply(
        self, name: str, own: str, asked: tuple[int, int], pin: Pin | None, deadline: Deadline
    ) -> tuple[Pin | None, Reply]:
        """An answer, and what the file has to be there."""
        for last in (False, True):
            place = self._places.get(name)
            seen, url = (pin, own) if place is None else (place.pin, place.url)
            led_from = None if url == own else own
            try:
                reply = self.client.open(
                    name, url, deadline, conditions(*asked, seen), led_from=led_from
                )
            except Transient:
                if place is not None:  # the server that a redirect named may be gone
                    self._places[name] = _Place(own, place.pin)
                raise
            if last or reply.url == own or reply.status not in _EXPIRED:
                break
            reply.close()
            self._places.pop(name, None)
        return seen, reply

    def _accepted(
        self, name: str, reply: Reply, start: int, end: int, seen: Pin | None
    ) -> tuple[Pin, int, int]:
        """What the file is, and which of its bytes come."""
        if reply.status == 412:
            raise changed(name, start, "the server has another content now")
        if reply.status == 416:
            said = reply.headers.get("Content-Range", "")
            if seen is None and start == 0 and said == "bytes */0":  # an empty file
                return pin_of(name, reply.headers, 0), 0, 0
            raise changed(name, start, f"it ends before byte {start}")
        if reply.status not in (200, 206):
            raise self.refusal(name, reply, start)
        unencoded(name, reply.headers)
        if reply.status == 206:
            end, size = content_range(name, reply.headers, start, end)
        else:
            end = size = _whole(name, reply, start, end, seen)
        found = pin_of(name, reply.headers, size)
        if seen is not None:
            check_same(name, seen, found, start)
        return found, start, end

    def close(self) -> None:
        self.client.close()


def _whole(name: str, reply: Reply, start: int, end: int, seen: Pin | None) -> int:
    """The size of a whole file that came where a range was asked for, if that will do."""
    length = reply.headers.get("Content-Length", "")
    size = int(length) if length.isascii() and length.isdigit() and len(length) < 19 else None
    if seen is not None and size is not None:
        check_same(name, seen, pin_of(name, reply.headers, size), start)
    small = seen is None and size is not None and size <= max(SMALL, end)
    if size is None or start != 0 or not (small or size == end):
        known = "unknown length" if size is None else f"{size} bytes"
        raise DownloadError(
            f"the server answered a request for a range of {show(name)} with all of it ({known})",
            file=name,
            detail={"status": 200},
            hint="it has to serve ranges (Accept-Ranges: bytes); fetch the file by other means",
        )
    return size


class _HttpAnswer(Answer):
    def __init__(self, pin: Pin, start: int, end: int, reply: Reply) -> None:
        super().__init__(pin, start, end)
        self._reply = reply

    def pieces(self) -> Iterator[bytes]:
        left = self.end - self.start
        while left:
            piece = self._reply.piece(min(left, PIECE))
            if not piece:
                raise Transient(f"the answer ended {left} bytes early")
            left -= len(piece)
            yield piece

    def close(self) -> None:
        self._reply.close()
