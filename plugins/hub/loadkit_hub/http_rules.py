"""Where requests may go: what an address is, which redirects are followed, which proxy is used."""

from __future__ import annotations

import http.client
import ipaddress
import socket
from base64 import b64encode
from urllib.parse import SplitResult, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from loadkit.errors import DownloadError
from loadkit.sources.shown import shown_source
from loadkit.text import printable

__all__ = ["Origin", "check_peer", "origin_of", "proxy_of", "proxy_user", "redirected"]

_PORTS = {"http": 80, "https": 443}
Origin = tuple[str, str, int]
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def origin_of(url: str) -> Origin:
    """Scheme, host and port of an address.

    Raises:
        DownloadError: it is no http(s) address.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = SplitResult("", "", "", "", ""), None
    if parts.scheme not in _PORTS or not parts.hostname or not url.isascii() or not _plain(url):
        raise DownloadError(
            f"{printable(shown_source(url))} is no http or https address",
            hint="a server sent it: do not use that server",
        )
    return parts.scheme, parts.hostname.lower(), port or _PORTS[parts.scheme]


def _plain(url: str) -> bool:
    return not any(ord(char) <= 0x20 or ord(char) == 0x7F for char in url)


def redirected(url: str, target: str) -> str:
    """Where a redirect leads, if that may be.

    Raises:
        DownloadError: another scheme, or from https to http.
    """
    found = urljoin(url, target)
    scheme, host, _ = origin_of(found)
    if scheme == "http" and urlsplit(url).scheme == "https":
        raise DownloadError(
            f"a redirect leads from https to http, to {printable(host)}",
            hint="the server, or somebody before it, is at fault",
        )
    return found.partition("#")[0]


def check_peer(connection: http.client.HTTPConnection, url: str, first: Origin) -> None:
    """A redirect may not lead into a network that the caller's own address is not in.

    Raises:
        DownloadError: it leads to this machine, a private or a link-local address.
    """
    peer = ipaddress.ip_address(connection.sock.getpeername()[0].partition("%")[0])
    if peer.is_global or origin_of(url)[1] == first[1]:
        return
    try:
        known = {ipaddress.ip_address(found[4][0]) for found in socket.getaddrinfo(*first[1:])}
    except (OSError, ValueError):
        known = set()
    if not peer.is_link_local and any(_alike(peer, address) for address in known):
        return
    raise DownloadError(
        f"a redirect leads to {printable(peer)}, an address inside a network",
        detail={"address": str(peer)},
        hint="the server is at fault: do not use it",
    )


def _alike(peer: Address, other: Address) -> bool:
    if peer.is_loopback or other.is_loopback:
        return peer.is_loopback and other.is_loopback
    return peer.is_private and other.is_private


def proxy_of(origin: Origin) -> SplitResult | None:
    """The proxy that the environment names for an origin."""
    scheme, host, _ = origin
    found = getproxies().get(scheme)
    if not found or proxy_bypass(host):
        return None
    return urlsplit(found if "://" in found else f"http://{found}")


def proxy_user(proxy: SplitResult) -> dict[str, str]:
    """The header that names the proxy's user, if its address does."""
    if not proxy.username:
        return {}
    pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": f"Basic {b64encode(pair.encode()).decode()}"}
