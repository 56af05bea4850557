"""A web server on loopback that serves a folder by ranges, and misbehaves when it is told to.

It keeps to HTTP (ETag, Last-Modified, Range, If-Range, If-Match) unless a behaviour is queued. It
also lists buckets as S3 does: ``/bucket?list-type=2``. Every request is noted.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

__all__ = ["Noted", "WebServer", "cut", "lie", "redirect", "stall", "status"]

_PIECE = 256 << 10


@dataclass
class Noted:
    """One request: its path (no query), headers in lower case, first line, status, bytes sent."""

    path: str
    query: str
    headers: dict[str, str]
    line: str
    status: int = 0
    sent: int = 0

    def __post_init__(self) -> None:
        self.asked = dict(self.headers)  # behaviours may change the others

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        web = self.server.web
        parts = urlsplit(self.path)
        self.noted = Noted(
            unquote(parts.path),
            parts.query,
            {k.lower(): v for k, v in self.headers.items()},
            self.requestline,
        )
        web.note(self.noted)
        behaviour = web.next_behaviour(self.noted)
        if behaviour is not None:
            behaviour(self)
        else:
            self.serve()

    def serve(self, most: int | None = None, **lies: str) -> None:
        """The honest answer; ``most``: break off after so many bytes; ``lies``: other headers."""
        query = parse_qs(self.noted.query)
        if "list-type" in query:
            return self.reply(200, self.server.web.listing(self.noted.path, query))
        path = self.server.web.folder / self.noted.path.lstrip("/")
        if not path.is_file():
            return self.reply(404, b"<Error><Code>NoSuchKey</Code></Error>")
        found = path.stat()
        etag = self.server.web.etag(path)
        size, start, end, code = found.st_size, 0, found.st_size, 200
        asked = self.noted.headers
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", asked.get("range", ""))
        modified = formatdate(found.st_mtime, usegmt=True)
        if "if-match" in asked and asked["if-match"] != etag:
            return self.reply(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        same = asked.get("if-range") in (None, etag, modified)
        headers = {"ETag": etag, "Last-Modified": modified, "Accept-Ranges": "bytes"}
        if match and same:
            start, end = int(match[1]), min(size, int(match[2] or size - 1) + 1)
            if start >= size:
                return self.reply(416, b"", {"Content-Range": f"bytes */{size}"})
            code = 206
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        headers["Content-Length"] = str(end - start)
        for key, value in lies.items():
            header = key.replace("_", "-")
            headers = {k: v for k, v in headers.items() if k.lower() != header.lower()}
            if value is not None:
                headers[header] = value
        self.start(code, headers)
        if self.command == "HEAD":
            return None
        left = end - start if most is None else min(most, end - start)
        with path.open("rb") as file:
            file.seek(start)
            while left:
                piece = file.read(min(left, _PIECE))
                self.send(piece)
                left -= len(piece)
                if self.server.web.rate:
                    time.sleep(len(piece) / self.server.web.rate)
        if most is not None:
            self.drop()
        return None

    def start(self, code: int, headers: dict[str, str]) -> None:
        self.noted.status = code
        self.send_response(code)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()

    def send(self, data: bytes) -> None:
        self.wfile.write(data)
        self.noted.sent += len(data)

    def reply(self, code: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.start(code, {"Content-Length": str(len(body)), **(headers or {})})
        if self.command != "HEAD":
            self.send(body)

    def drop(self) -> None:
        """Break the connection off."""
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


Behaviour = Callable[[_Handler], None]


def status(code: int, **headers: str) -> Behaviour:
    """Answer with a status and nothing else; ``Retry_After="1"`` is a header."""
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    return lambda handler: handler.reply(code, b"", named)


def cut(after: int) -> Behaviour:
    """Serve honestly, and break off after so many bytes of the body."""
    return lambda handler: handler.serve(most=after)


def lie(**headers: Any) -> Behaviour:
    """Serve honestly, with other headers (``Content_Range="..."``; None leaves one out)."""
    return lambda handler: handler.serve(**headers)


def redirect(to: str, code: int = 302) -> Behaviour:
    """Send the caller elsewhere."""
    return lambda handler: handler.reply(code, b"", {"Location": to})


def stall(seconds: float = 60.0, after: int | None = None) -> Behaviour:
    """Say nothing, or stop saying anything after some bytes of the body."""

    def behave(handler: _Handler) -> None:
        if after is not None:
            with suppress(OSError):
                handler.serve(most=after) if after == 0 else _serve_some(handler, after)
        handler.server.web.released.wait(seconds)
        handler.drop()

    return behave


def _serve_some(handler: _Handler, after: int) -> None:
    drop, handler.drop = handler.drop, lambda: None  # type: ignore[method-assign]
    handler.serve(most=after)
    handler.drop = drop  # type: ignore[method-assign]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64
    web: WebServer

    def handle_error(self, *_: Any) -> None:
        """A client that went away is no news."""


@dataclass
class WebServer:
    """Serves ``folder`` while it is entered.

    Attributes:
        requests: what was asked, in order.
        rate: bytes a second of each answer; 0: as fast as it goes.
        always: a behaviour for every request that it picks; after the queued ones.
    """

    folder: Path
    requests: list[Noted] = field(default_factory=list)
    rate: float = 0
    always: Callable[[Noted], Behaviour | None] | None = None
    page: int = 1000
    endless: int = 0  # a listing pretends to hold so many keys more

    def __post_init__(self) -> None:
        self._queued: list[tuple[Callable[[Noted], bool], Behaviour]] = []
        self._lock = threading.Lock()
        self._etags: dict[tuple[str, int, int], str] = {}
        self.released = threading.Event()

    def __enter__(self) -> Self:
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.web = self
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        """Its root, without a "/" at the end."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def queue(self, *behaviours: Behaviour, name: str = "", big: bool = False) -> None:
        """The next requests are answered so; ``name``: only those for a file; ``big``: of parts.

        ``big`` are requests for more than a start: those that do not begin at byte 0.
        """

        def picks(noted: Noted) -> bool:
            later = not noted.headers.get("range", "").startswith("bytes=0-")
            return (not name or noted.name == name) and (not big or later)

        with self._lock:
            self._queued += [(picks, each) for each in behaviours]

    def next_behaviour(self, noted: Noted) -> Behaviour | None:
        with self._lock:
            for at, (picks, behaviour) in enumerate(self._queued):
                if picks(noted):
                    del self._queued[at]
                    return behaviour
        return None if self.always is None else self.always(noted)

    def note(self, noted: Noted) -> None:
        with self._lock:
            self.requests.append(noted)

    def etag(self, path: Path) -> str:
        """An ETag of a file: of its content's start, size and time."""
        found = path.stat()
        key = str(path), found.st_size, found.st_mtime_ns
        if key not in self._etags:
            with path.open("rb") as file:
                digest = hashlib.sha256(file.read(1 << 20) + repr(key[1:]).encode())
            self._etags[key] = f'"{digest.hexdigest()[:32]}"'
        return self._etags[key]

    def sent(self, name: str = "") -> int:
        """Bytes of files that were sent, of one file or of all."""
        good = (each for each in self.requests if each.status in (200, 206))
        return sum(each.sent for each in good if not name or each.name == name)

    def listing(self, path: str, query: dict[str, list[str]]) -> bytes:
        """A page of a bucket's keys, as S3 writes it."""
        bucket = path.strip("/")
        prefix = query.get("prefix", [""])[0]
        root = self.folder / bucket
        keys = sorted(str(file.relative_to(root)) for file in root.rglob("*") if file.is_file())
        keys = [key for key in keys if key.startswith(prefix)]
        total = len(keys) + self.endless
        first = int(query.get("continuation-token", ["0"])[0])
        rows = []
        for number in range(first, min(total, first + self.page)):
            if number < len(keys):
                file = root / keys[number]
                key, etag, size = keys[number], self.etag(file), file.stat().st_size
            else:
                key, etag, size = f"{prefix}{number:09d}.txt", '"0"', 1
            rows.append(
                f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z"
                f"</LastModified><ETag>{escape(etag)}</ETag><Size>{size}</Size></Contents>"
            )
        after = first + self.page
        more = after < total
        token = f"<NextContinuationToken>{after}</NextContinuationToken>" if more else ""
        return (
            '<?xml version="1.0"?><ListBucketResult>'
            f"<Name>{escape(bucket)}</Name><Prefix>{escape(quote(prefix))}</Prefix>"
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{''.join(rows)}"
            "</ListBucketResult>"
        ).encode()


def touch_later(path: Path) -> None:
    """Give a file another time of modification."""
    found = path.stat()
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns + 5_000_000_000))
