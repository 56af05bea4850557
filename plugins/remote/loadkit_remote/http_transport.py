"""Ranges of files on a web server. Every answer is held against what was asked and seen before.

Credentials go to the host that they were given for and to no other; the library that makes the
requests is not let write a line about them, since it would write whole addresses.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from urllib.parse import quote, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    LocationValueError,
    NewConnectionError,
    ReadTimeoutError,
    SSLError,
)
from urllib3.response import BaseHTTPResponse
from urllib3.util import Timeout, make_headers

from loadkit.errors import DownloadError
from loadkit.file_checks import show
from loadkit.sources.shown import shown_source
from loadkit_remote.address import Address
from loadkit_remote.answers import Absent, Answer, Denied, Pin, Transient, Transport, changed
from loadkit_remote.http_rules import (
    check_same,
    content_range,
    next_address,
    origin_of,
    pin_of,
    retry_after,
    unencoded,
    wrong,
)
from loadkit_remote.patience import Deadline
from loadkit_remote.quiet import unlogged

__all__ = ["HttpTransport"]

MAX_REDIRECTS = 5
PIECE = 1 << 20  # bytes taken from a connection at once, at most
SMALL = 64 << 10  # an answer without ranges is taken up to here, and the rest of a body drained
CONNECTIONS = 32  # that are kept open to one host
_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
_MOVED = frozenset({301, 302, 303, 307, 308})


class HttpTransport(Transport):
    """The files below one address.

    Args:
        address: where.
        timeout: seconds of silence after which an attempt has failed.
    """

    def __init__(self, address: Address, timeout: float) -> None:
        self.base = address
        self._timeout = timeout
        self._pools: dict[str, urllib3.PoolManager] = {}
        self._lock = threading.Lock()

    def url_of(self, name: str) -> str:
        """The address of a file, secrets and all."""
        return f"{self.base.root}{quote(name)}{self.base.query}"

    def shown(self, name: str) -> str:
        return shown_source(self.url_of(name))

    def get(self, name: str, start: int, end: int, pin: Pin | None, deadline: Deadline) -> Answer:
        headers = {"Range": f"bytes={start}-{end - 1}"}
        if pin is not None and pin.strong:
            headers |= {"If-Match": pin.strong, "If-Range": pin.strong}
        elif pin is not None and pin.modified and pin.etag is None:
            headers |= {"If-Unmodified-Since": pin.modified, "If-Range": pin.modified}
        response = self.open(name, self.url_of(name), headers, deadline)
        try:
            return self._answer(name, response, start, end, pin, deadline)
        except BaseException:
            _let_go(response)
            raise

    def open(
        self, name: str, url: str, headers: dict[str, str], deadline: Deadline
    ) -> BaseHTTPResponse:
        """The answer to one request, redirects followed; its body is not read yet.

        Raises:
            Transient: it failed in a way that may pass.
            DownloadError: a redirect that is not followed, or too many.
        """
        home = origin_of(url)
        for _ in range(MAX_REDIRECTS + 1):
            mine = self.base.headers if origin_of(url) == home else {}
            response = self._ask(name, url, headers | mine, deadline)
            if response.status not in _MOVED:
                return response
            location = response.headers.get("Location")
            _let_go(response)
            url = next_address(name, url, location)
        raise wrong(name, f"more than {MAX_REDIRECTS} redirects")

    def _ask(
        self, name: str, url: str, headers: dict[str, str], deadline: Deadline
    ) -> BaseHTTPResponse:
        seconds = max(0.001, min(self._timeout, deadline.left()))
        always = {"Accept-Encoding": "identity", "User-Agent": "loadkit"}
        host = origin_of(url)[1]
        try:
            with unlogged():
                return self._pool(url).request(
                    "GET",
                    url,
                    headers=always | headers,
                    redirect=False,
                    retries=False,
                    preload_content=False,
                    decode_content=False,
                    timeout=Timeout(connect=seconds, read=seconds),
                )
        except SSLError as error:
            reason = str(getattr(error, "args", [""])[0])[:120]
            raise DownloadError(
                f"no safe connection to {show(host)}: {reason}",
                file=name,
                hint="its certificate is not trusted here: see SSL_CERT_FILE",
            ) from None
        except NewConnectionError:  # a kind of timeout, as the library has it
            raise Transient(f"no connection to {show(host)}", unreached=True) from None
        except (ConnectTimeoutError, ReadTimeoutError):
            raise Transient(f"no answer within {seconds:.1f} s") from None
        except LocationValueError:
            raise wrong(name, "an address that is none") from None
        except (HTTPError, OSError) as error:
            raise Transient(f"the connection broke ({type(error).__name__})") from None

    def _answer(
        self,
        name: str,
        response: BaseHTTPResponse,
        start: int,
        end: int,
        pin: Pin | None,
        deadline: Deadline,
    ) -> Answer:
        """The checked answer."""
        status, headers = response.status, response.headers
        if status in _AGAIN:
            wait = retry_after(headers)
            raise Transient(f"the server answered {status}", retry_after=wait, status=status)
        if status in (404, 410):
            raise Absent(name)
        if status in (401, 403):
            raise Denied(f"the server answered {status}")
        if status == 412:
            raise changed(name, start, "the server has another content now")
        if status == 416:
            return self._beyond(name, response, start, pin)
        if status not in (200, 206):
            raise DownloadError(
                f"the server answered {status} to the request for {show(name)}",
                file=name,
                offset=start,
                detail={"status": status},
            )
        unencoded(name, headers)
        if status == 206:
            stop, size = content_range(name, headers, start, end)
        else:
            start, stop = 0, self._whole(name, response, end, pin)
            size = stop
        found = pin_of(name, headers, size)
        if pin is not None:
            check_same(name, pin, found, start)
        return _HttpAnswer(found, start, stop, response, deadline)

    def _whole(self, name: str, response: BaseHTTPResponse, end: int, pin: Pin | None) -> int:
        """The size of a whole file that came where a range was asked for, if that will do."""
        length = response.headers.get("Content-Length", "")
        size = int(length) if length.isascii() and length.isdigit() and len(length) < 19 else None
        now = response.headers.get("ETag"), response.headers.get("Last-Modified")
        if pin is not None and (pin.etag, pin.modified) != now:
            raise changed(name, 0, "the server sent all of it where a part was asked for")
        if size is None or pin is not None or size > max(SMALL, end):
            known = "unknown length" if size is None else f"{size} bytes"
            raise DownloadError(
                f"the server answered a request for a range of {show(name)} with all of it "
                f"({known})",
                file=name,
                detail={"status": 200},
                hint="it has to serve ranges (Accept-Ranges: bytes); fetch the file by other means",
            )
        return size

    def _beyond(self, name: str, response: BaseHTTPResponse, start: int, pin: Pin | None) -> Answer:
        """The answer to a range that a file has not: an empty file is one."""
        size = response.headers.get("Content-Range", "").removeprefix("bytes */")
        if pin is None and start == 0 and size == "0":
            _let_go(response)
            return _Nothing(pin_of(name, response.headers, 0), 0, 0)
        raise changed(name, start, f"it ends before byte {start}")

    def _pool(self, url: str) -> urllib3.PoolManager:
        """The connections for an address: direct ones, or those to the proxy it goes through."""
        scheme, host, _ = origin_of(url)
        proxy = getproxies().get(scheme, "")
        if proxy and proxy_bypass(host):
            proxy = ""
        with self._lock:
            if proxy not in self._pools:
                self._pools[proxy] = _manager(proxy)
            return self._pools[proxy]

    def close(self) -> None:
        with self._lock:
            pools, self._pools = self._pools, {}
        for pool in pools.values():
            pool.clear()


class _HttpAnswer(Answer):
    def __init__(
        self, pin: Pin, start: int, end: int, response: BaseHTTPResponse, deadline: Deadline
    ) -> None:
        super().__init__(pin, start, end)
        self._response = response
        self._deadline = deadline

    def pieces(self) -> Iterator[bytes]:
        left = self.end - self.start
        while left:
            if not self._deadline.left():
                raise Transient("the bytes come too slowly")
            piece = self._piece(min(left, PIECE))
            if not piece:
                raise Transient(f"the answer ended {left} bytes early")
            left -= len(piece)
            yield piece

    def _piece(self, most: int) -> bytes:
        try:
            return self._response.read1(most, decode_content=False)
        except ReadTimeoutError:
            raise Transient("no more bytes came in time") from None
        except (HTTPError, OSError) as error:
            raise Transient(f"the connection broke ({type(error).__name__})") from None

    def close(self) -> None:
        _let_go(self._response)


class _Nothing(Answer):
    def pieces(self) -> Iterator[bytes]:
        yield from ()

    def close(self) -> None:
        pass


def _manager(proxy: str) -> urllib3.PoolManager:
    if not proxy:
        return urllib3.PoolManager(num_pools=8, maxsize=CONNECTIONS)
    parts = urlsplit(proxy)
    headers = {}
    if parts.username is not None:
        user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers = make_headers(proxy_basic_auth=user)
    return urllib3.ProxyManager(proxy, num_pools=8, maxsize=CONNECTIONS, proxy_headers=headers)


def _let_go(response: BaseHTTPResponse) -> None:
    """Give a connection back if its answer is read or short, and close it if not."""
    try:
        left = getattr(response, "length_remaining", None)
        if left is not None and left <= SMALL:
            while response.read1(SMALL, decode_content=False):  # the connection sees the end, too
                pass
            response.release_conn()
            return
    except (HTTPError, OSError):
        pass
    response.close()
