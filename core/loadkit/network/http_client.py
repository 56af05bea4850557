"""HTTP as sources need it: reads only, redirects watched, secrets kept to their own host.

``urllib3`` makes the requests. It neither follows redirects nor tries again here: both are decided
by rules that hold for every transport.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

import urllib3
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    LocationValueError,
    NewConnectionError,
    ProxyError,
    ReadTimeoutError,
    SSLError,
)
from urllib3.response import BaseHTTPResponse
from urllib3.util import Timeout

from loadkit import __version__
from loadkit.closing import Closing
from loadkit.errors import DownloadError, LoadkitError
from loadkit.file_checks import show
from loadkit.network.addresses import (
    Origin,
    next_address,
    origin_of,
    proxy_of,
    user_header,
    without_user,
)
from loadkit.network.answers import Transient, wrong
from loadkit.network.http_rules import unencoded
from loadkit.network.patience import Deadline, Retries, retry_after
from loadkit.network.watched import pools, watched
from loadkit.text import printable

__all__ = ["HttpClient", "Reply"]

MAX_REDIRECTS = 5
SMALL = 64 << 10  # bytes that are drained of a body to keep its connection
CONNECTIONS = 32  # that are kept open to one host
_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})  # statuses that may pass
_MOVED = frozenset({301, 302, 303, 307, 308})
_ALWAYS = {"Accept-Encoding": "identity", "User-Agent": f"loadkit/{__version__}"}


class Reply(Closing):
    """An answer whose body is still to be read; a context manager.

    Attributes:
        url: where it came from, after redirects.
        hops: the headers of the redirects before it, first ones first.
    """

    def __init__(
        self,
        url: str,
        response: BaseHTTPResponse,
        hops: list[Mapping[str, str]],
        deadline: Deadline,
    ) -> None:
        self.url = url
        self.status: int = response.status
        self.headers: Mapping[str, str] = response.headers
        self.hops = hops
        self._response = response
        self._deadline = deadline

    def piece(self, most: int) -> bytes:
        """Some bytes of the body, as they come; none at its end.

        Raises:
            Transient: the connection failed, or the deadline has passed.
        """
        if not self._deadline.left():
            raise Transient("the bytes come too slowly")
        try:
            return self._response.read1(most, decode_content=False)
        except ReadTimeoutError:
            raise Transient("no more bytes came in time") from None
        except (HTTPError, OSError) as error:
            raise Transient(f"the connection broke ({type(error).__name__})") from None

    def content(self, limit: int) -> bytes:
        """The whole body.

        Raises:
            Transient: it breaks off.
            DownloadError: it is longer than ``limit`` bytes, or encoded.
        """
        unencoded("", self.headers)
        data = bytearray()
        while piece := self.piece(SMALL):
            data += piece
            self._deadline.arrived(len(piece))
            if len(data) > limit:
                raise wrong("", f"more than {limit} bytes")
        return bytes(data)

    def close(self) -> None:
        """Give the connection back if its answer is read or short, and close it if not."""
        response = self._response
        try:
            left = getattr(response, "length_remaining", None)
            if left is not None and left <= SMALL:
                while response.read1(SMALL, decode_content=False):  # the connection sees the end
                    pass
                response.release_conn()
                return
        except (HTTPError, OSError):
            pass  # the rest of an answer that nobody wants: the connection is of no use any more
        response.close()


class HttpClient:
    """Sends requests and follows redirects; keeps connections. Used from any thread.

    Args:
        timeout: seconds of silence after which an attempt has failed.
        credentials: headers by origin; they are sent to that origin and to no other.
    """

    def __init__(
        self, timeout: float, credentials: Mapping[Origin, Mapping[str, str]] | None = None
    ) -> None:
        self._timeout = timeout
        self._credentials = dict(credentials or {})
        self._pools: dict[str, urllib3.PoolManager] = {}
        self._lock = threading.Lock()

    def open(
        self,
        name: str,
        url: str,
        deadline: Deadline,
        headers: Mapping[str, str] | None = None,
        *,
        led_from: str | None = None,
    ) -> Reply:
        """The answer to one request, redirects followed; its body is not read yet.

        Args:
            name: the file that is asked for; "" for anything else.
            url: its address.
            deadline: no attempt waits longer.
            headers: beside those that are always sent.
            led_from: the address from which an earlier redirect led to ``url``.

        Raises:
            Transient: it failed in a way that may pass.
            DownloadError: a redirect that is not followed, or too many; no safe connection.
        """
        first = origin_of(led_from or url)
        hops: list[Mapping[str, str]] = []
        for _ in range(MAX_REDIRECTS + 1):
            redirected = bool(hops or led_from)
            response = self._ask(name, url, headers or {}, deadline, first if redirected else None)
            reply = Reply(url, response, hops, deadline)
            if reply.status in _AGAIN:
                wait = retry_after(reply.headers)
                reply.close()
                told = f"the server answered {reply.status}"
                raise Transient(told, retry_after=wait, status=reply.status)
            if reply.status not in _MOVED:
                return reply
            reply.close()
            hops = [*hops, reply.headers]
            url = next_address(name, url, reply.headers.get("Location"))
        raise wrong(name, f"more than {MAX_REDIRECTS} redirects")

    def content(
        self, url: str, limit: int, retries: Retries, refused: Callable[[Reply], LoadkitError]
    ) -> tuple[bytes, Mapping[str, str]]:
        """The whole of a small answer, tried again, and its headers.

        Raises:
            DownloadError: the server fails, or answers wrong or with more than ``limit`` bytes.
            LoadkitError: what ``refused`` makes of a status that is not 200.
        """
        while True:
            try:
                with self.open("", url, retries.deadline) as reply:
                    if reply.status != 200:
                        raise refused(reply)
                    return reply.content(limit), reply.headers
            except Transient as error:
                retries.failed(error)

    def _ask(
        self,
        name: str,
        url: str,
        headers: Mapping[str, str],
        deadline: Deadline,
        first: Origin | None,
    ) -> BaseHTTPResponse:
        origin = origin_of(url)
        host, proxy = show(origin[1]), proxy_of(origin)
        seconds = max(0.001, min(self._timeout, deadline.left()))
        try:
            with watched(name, None if proxy else first):
                return self._pool(proxy).request(
                    "GET",
                    without_user(url),
                    headers={**_ALWAYS, **self._credentials.get(origin, {}), **headers},
                    redirect=False,
                    retries=False,
                    preload_content=False,
                    decode_content=False,
                    timeout=Timeout(connect=seconds, read=seconds),
                )
        except SSLError as error:
            raise _unsafe(name, host, error) from None
        except (NewConnectionError, ProxyError) as error:  # the first is a kind of timeout there
            raise Transient(f"{host} cannot be reached{_why(error)}", unreached=True) from None
        except (ConnectTimeoutError, ReadTimeoutError):
            raise Transient(f"no answer within {seconds:.1f} s") from None
        except LocationValueError:
            raise wrong(name, "an address that is none") from None
        except (HTTPError, OSError) as error:
            raise Transient(f"the connection broke ({type(error).__name__})") from None

    def _pool(self, proxy: str) -> urllib3.PoolManager:
        """The connections that go directly, or through a proxy."""
        with self._lock:
            if proxy not in self._pools:
                user = user_header("Proxy-Authorization", urlsplit(proxy))
                self._pools[proxy] = pools(proxy, user, CONNECTIONS)
            return self._pools[proxy]

    def close(self) -> None:
        """Close the connections that are kept; may be called twice."""
        with self._lock:
            managers, self._pools = self._pools, {}
        for manager in managers.values():
            manager.clear()


def _unsafe(name: str, host: str, error: SSLError) -> Exception:
    """What a failed handshake means: a certificate is refused at once, the rest may pass."""
    cause = error.args[0] if error.args else error
    if not isinstance(cause, ssl.SSLCertVerificationError | ssl.CertificateError):
        return Transient(f"{host} cannot be reached safely{_why(error)}", unreached=True)
    return DownloadError(
        f"no safe connection to {host}: {printable(cause, 120)}",
        code="E_OFFLINE",
        file=name or None,
        hint="its certificate is not trusted here: see SSL_CERT_FILE",
    )


def _why(error: BaseException) -> str:
    """What the operating system says of it, in words without addresses."""
    known = (error.__cause__, *error.args)
    found = (cause.strerror for cause in known if isinstance(cause, OSError) and cause.strerror)
    return "".join(f": {printable(text, 120)}" for text in list(found)[:1])
