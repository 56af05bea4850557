"""Where requests may go: what an address is, which redirects are followed, who is asked for.

A server is not trusted: a redirect leads to the web, and never from there into a network.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from base64 import b64encode
from urllib.parse import SplitResult, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from loadkit.errors import DownloadError
from loadkit.file_checks import show
from loadkit.network.answers import wrong
from loadkit.sources.shown import shown_source
from loadkit.text import printable

__all__ = [
    "IPAddress",
    "Origin",
    "addresses_of",
    "check_reached",
    "next_address",
    "origin_of",
    "proxy_of",
    "user_header",
    "without_user",
]

MAX_LOCATION = 16_384  # characters
_ODD = re.compile(r"[\x00-\x20\x7f-\U0010ffff]")
_PORTS = {"http": 80, "https": 443}
Origin = tuple[str, str, int]
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


def origin_of(url: str) -> Origin:
    """Scheme, host and port: credentials are for these.

    Raises:
        DownloadError: it is no http(s) address.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = SplitResult("", "", "", "", ""), None
    if parts.scheme not in _PORTS or not parts.hostname or _ODD.search(url):
        raise DownloadError(
            f"{printable(shown_source(url))} is no http or https address",
            hint="a server sent it: do not use that server",
        )
    return parts.scheme, parts.hostname.lower(), port or _PORTS[parts.scheme]


def next_address(name: str, url: str, location: str | None) -> str:
    """Where a redirect leads, if it may be followed.

    Raises:
        DownloadError: no address, another scheme, from https to http, or with a password in it.
    """
    if not location or len(location) > MAX_LOCATION or _ODD.search(location):
        raise wrong(name, "a redirect to no address")
    try:
        target = urljoin(url, location)
        new = urlsplit(target)
        _ = new.port
    except ValueError:
        raise wrong(name, "a redirect to no address") from None
    shown = show(shown_source(target))
    if new.scheme not in _PORTS or not new.hostname:
        raise wrong(name, f"a redirect to {shown}: only http and https are followed")
    if new.scheme == "http" and urlsplit(url).scheme == "https":
        raise wrong(name, f"a redirect from https to http, to {shown}")
    if new.username is not None or new.password is not None:
        raise wrong(name, f"a redirect to {shown}, with credentials in it")
    return target.partition("#")[0]


def check_reached(name: str, address: IPAddress, host: str, first: Origin) -> None:
    """A redirect may not lead into a network that the caller's own address is not in.

    Args:
        name: the file that is asked for.
        address: what would be, or is, connected to.
        host: its name.
        first: the caller's own address.

    Raises:
        DownloadError: it leads to this machine, a private or a link-local address.
    """
    address = getattr(address, "ipv4_mapped", None) or address
    if host.lower() == first[1] or (address.is_global and not address.is_multicast):
        return
    never = address.is_link_local or address.is_multicast or address.is_unspecified
    if not never and any(_alike(address, own) for own in addresses_of(*first[1:])):
        return
    what = f"a redirect to {show(host)}, which is {address}, an address inside a network"
    raise wrong(name, f"{what}: not followed")


def _alike(address: IPAddress, own: IPAddress) -> bool:
    if address.is_loopback or own.is_loopback:
        return address.is_loopback and own.is_loopback
    return address.is_private and own.is_private


def addresses_of(host: str, port: int) -> list[IPAddress]:
    """The addresses of a host, IPv4 ones inside IPv6 unwrapped; none where none is known."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    addresses = [ipaddress.ip_address(str(place[0]).partition("%")[0]) for *_, place in found]
    return [getattr(each, "ipv4_mapped", None) or each for each in addresses]


def proxy_of(origin: Origin) -> str:
    """The address of the proxy that the environment names for an origin; "" for none."""
    scheme, host, _ = origin
    found = getproxies().get(scheme)
    if not found or proxy_bypass(host):
        return ""
    return found if "://" in found else f"http://{found}"


def user_header(name: str, parts: SplitResult) -> dict[str, str]:
    """The header that says who asks (``Authorization``, ...), if an address names a user."""
    if parts.username is None:
        return {}
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {name: f"Basic {b64encode(pair.encode()).decode()}"}


def without_user(url: str) -> str:
    """An address as it is sent: a proxy would be told the user in it, too."""
    netloc = urlsplit(url).netloc
    return url.replace(netloc, netloc.rpartition("@")[2], 1) if "@" in netloc else url
