"""HTTP as sources need it: reads only, redirects watched, secrets kept to their own host."""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from loadkit.errors import DownloadError
from loadkit.sources.shown import shown_source
from loadkit.text import printable
from loadkit_hub.http_rules import (
    Origin,
    check_peer,
    origin_of,
    proxy_of,
    proxy_user,
    redirected,
)
from loadkit_hub.patience import RETRIED, Patience, retry_after

__all__ = ["HttpClient", "Response", "reason"]

MAX_REDIRECTS = 8
UNREACHED = 3  # attempts at a server that does not take the connection
ATTEMPTS = 8  # at one that takes it and does not answer
IDLE = 16  # connections kept open for later requests
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


@dataclass(eq=False)
class Response:
    """An answer whose body is still to be read.

    Attributes:
        url: where it came from, after redirects.
        headers: names in lower case.
        hops: the headers of the redirects before it, first ones first.
    """

    status: int
    url: str
    headers: dict[str, str]
    hops: list[dict[str, str]]
    body: http.client.HTTPResponse
    connection: http.client.HTTPConnection
    client: HttpClient
    left: int | None = None  # bytes of the body that did not come yet; None: not known
    done: bool = False
    closed: bool = False

    def read(self, most: int, patience: Patience) -> bytes:
        """Some bytes of the body, as they come; none at its end.

        Raises:
            OSError, HTTPException: the connection failed.
            DownloadError: E_TIMEOUT.
        """
        if self.connection.sock is not None:
            self.connection.sock.settimeout(patience.timeout())
        data = self.body.read1(most)
        patience.arrived(len(data))
        if self.left is not None:
            self.left -= len(data)
        self.done = self.body.isclosed() or self.left == 0
        return data

    def text(self, limit: int, patience: Patience) -> bytes:
        """The whole body.

        Raises:
            DownloadError: it is longer than ``limit`` bytes, or shorter than was announced.
        """
        parts, size = [], 0
        while data := self.read(min(1 << 16, limit + 1 - size), patience):
            parts.append(data)
            size += len(data)
            if size > limit:
                self.close()
                told = f"{printable(shown_source(self.url))} sends more than {limit} bytes"
                raise DownloadError(told, detail={"limit": limit})
        if self.left:
            raise http.client.IncompleteRead(b"", self.left)
        self.close()
        return b"".join(parts)

    def close(self) -> None:
        """Give the connection back, or close it where bytes are left in it; may be called twice."""
        if self.closed:
            return
        self.closed = True
        reusable = self.done and not self.body.will_close
        self.body.close()
        self.client.give_back(self, reusable)


class HttpClient:
    """Sends requests and follows redirects; keeps connections. Used from any thread.

    Args:
        headers: of every request.
        credentials: headers by origin; they are sent to that origin and to no other.
    """

    def __init__(
        self,
        headers: Mapping[str, str] | None = None,
        credentials: Mapping[Origin, Mapping[str, str]] | None = None,
    ) -> None:
        self.headers = {"Accept-Encoding": "identity", "User-Agent": "loadkit", **(headers or {})}
        self.credentials = dict(credentials or {})
        self._lock = threading.Lock()
        self._idle: list[tuple[Origin, http.client.HTTPConnection]] = []
        self._closed = False
        self._tls: ssl.SSLContext | None = None

    def get(
        self,
        url: str,
        patience: Patience,
        headers: Mapping[str, str] | None = None,
        *,
        method: str = "GET",
    ) -> Response:
        """The final answer to a request; what may pass is tried again.

        Statuses that will not pass are the caller's to judge.

        Raises:
            DownloadError: the server is not reached (``detail["unreached"]``), its redirects are
                refused, or it does not answer in time (E_TIMEOUT).
        """
        while True:
            try:
                response = self._follow(method, url, patience, headers or {})
            except (OSError, http.client.HTTPException) as error:
                if self._unreached(error) and patience.attempts + 1 >= UNREACHED:
                    raise unreached(url, error) from error
                patience.pause(reason(error), most=ATTEMPTS)
                continue
            if response.status not in RETRIED:
                return response
            asked = retry_after(response.headers.get("retry-after"))
            response.close()
            patience.pause(f"the server answered {response.status}", asked)

    @staticmethod
    def _unreached(error: BaseException) -> bool:
        return isinstance(error, (ConnectionRefusedError, socket.gaierror, ssl.SSLError)) or (
            isinstance(error, OSError) and error.errno in (101, 113)  # no route
        )

    def _follow(
        self, method: str, url: str, patience: Patience, headers: Mapping[str, str]
    ) -> Response:
        hops: list[dict[str, str]] = []
        first = origin_of(url)
        for _ in range(MAX_REDIRECTS):
            response = self._send(method, url, patience, headers, first if hops else None)
            response.hops = hops
            target = response.headers.get("location")
            if response.status not in _REDIRECTS or target is None:
                return response
            response.close()
            hops = [*hops, response.headers]
            url = redirected(url, target)
        raise DownloadError(
            f"{printable(shown_source(url))}: more than {MAX_REDIRECTS} redirects",
            hint="the server is at fault",
        )

    def _send(
        self,
        method: str,
        url: str,
        patience: Patience,
        headers: Mapping[str, str],
        redirected_from: Origin | None,
    ) -> Response:
        """One request on one connection; a kept one that was closed meanwhile is replaced."""
        origin = origin_of(url)
        parts = urlsplit(url)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        proxy = proxy_of(origin)
        if proxy is not None and origin[0] == "http":
            path = f"http://{parts.netloc.rpartition('@')[2]}{path}"
        sent = {**self.headers, **self.credentials.get(origin, {}), **headers}
        if proxy is not None and origin[0] == "http":
            sent |= proxy_user(proxy)
        for connection in (self._kept(origin), None):
            fresh = connection is None
            connection = connection or self._connect(origin, proxy)
            try:
                connection.timeout = patience.timeout()
                if connection.sock is None:
                    connection.connect()
                connection.sock.settimeout(patience.timeout())
                if redirected_from is not None and proxy is None:
                    check_peer(connection, url, redirected_from)
                connection.request(method, path, headers=sent)
                body = connection.getresponse()
            except TimeoutError:
                connection.close()
                raise
            except (OSError, http.client.HTTPException):
                connection.close()
                if fresh:
                    raise
                continue
            except BaseException:
                connection.close()
                raise
            return self._response(method, url, connection, body)
        raise AssertionError  # the second turn returns or raises

    def _response(
        self,
        method: str,
        url: str,
        connection: http.client.HTTPConnection,
        body: http.client.HTTPResponse,
    ) -> Response:
        found: dict[str, str] = {}
        for name, value in body.getheaders():
            found.setdefault(name.lower(), value)
        response = Response(body.status, url, found, [], body, connection, self, body.length)
        response.done = body.isclosed() or method == "HEAD" or body.length == 0
        encoding = found.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            response.close()
            raise DownloadError(
                f"{printable(shown_source(url))} sends its body as {printable(encoding, 40)!r}, "
                "which was not asked for",
                hint="the server, or a proxy before it, is at fault",
            )
        return response

    def _kept(self, origin: Origin) -> http.client.HTTPConnection | None:
        with self._lock:
            for index, (kept, connection) in enumerate(self._idle):
                if kept == origin:
                    del self._idle[index]
                    return connection
        return None

    def _connect(self, origin: Origin, proxy: SplitResult | None) -> http.client.HTTPConnection:
        scheme, host, port = origin
        at = (host, port) if proxy is None else (proxy.hostname or "", proxy.port or 8080)
        if scheme == "http":
            return http.client.HTTPConnection(*at)
        if self._tls is None:
            self._tls = ssl.create_default_context()
        connection = http.client.HTTPSConnection(*at, context=self._tls)
        if proxy is not None:
            connection.set_tunnel(host, port, headers=proxy_user(proxy))
        return connection

    def give_back(self, response: Response, reusable: bool) -> None:
        """Keep a response's connection for a later request, or close it."""
        with self._lock:
            if reusable and not self._closed and len(self._idle) < IDLE:
                self._idle.append((origin_of(response.url), response.connection))
                return
        response.connection.close()

    def close(self) -> None:
        """Close the connections that are kept; may be called twice."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()


def reason(error: BaseException) -> str:
    """What went wrong with a connection, in words without addresses."""
    if isinstance(error, TimeoutError):
        return "the connection went silent"
    if isinstance(error, http.client.HTTPException):
        return f"the answer broke off or is no HTTP ({type(error).__name__})"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return type(error).__name__


def unreached(url: str, error: BaseException) -> DownloadError:
    """The error of a server that takes no connection."""
    scheme, host, port = origin_of(url)
    return DownloadError(
        f"{scheme}://{printable(host)}:{port} cannot be reached: {reason(error)}",
        detail={"unreached": True, "host": host},
        hint="see whether this machine is online, and proxies are set",
    )
