"""What is accepted of a web server: its ETags, its ranges, and where it may send us.

A server is not trusted: nothing it says is a path, every number is held against what was asked,
and a redirect leads to the web and never to the machine's own network services.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from urllib.parse import SplitResult, urljoin, urlsplit

from loadkit.errors import DownloadError
from loadkit.file_checks import show
from loadkit.sources.shown import shown_source
from loadkit_remote.answers import Pin, Transient, changed

__all__ = ["content_range", "next_address", "origin_of", "pin_of", "retry_after", "unencoded"]

MAX_ETAG = 512  # characters
MAX_LOCATION = 16_384
_ETAG = re.compile(r'(?:W/)?"[\x21\x23-\x7e]{1,510}"')
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")
_ODD = re.compile(r"[\x00-\x20\x7f-\uffff]")


def pin_of(name: str, headers: Mapping[str, str], size: int) -> Pin:
    """What an answer says its file is.

    Raises:
        DownloadError: the ETag is none.
    """
    etag = headers.get("ETag")
    if etag is not None and not _ETAG.fullmatch(etag):
        raise wrong(name, f"an ETag that is none: {show(etag[:60])}, {len(etag)} characters")
    modified = headers.get("Last-Modified")
    if modified is not None and (len(modified) > 64 or not modified.isprintable()):
        modified = None
    return Pin(size, etag, modified)


def content_range(name: str, headers: Mapping[str, str], start: int, end: int) -> tuple[int, int]:
    """The end of the range that a 206 holds, and the whole file's size.

    Raises:
        DownloadError: it is not the range that was asked for.
    """
    found = _RANGE.fullmatch(headers.get("Content-Range", ""))
    if found is None:
        said = show(headers.get("Content-Range", "")[:60])
        raise wrong(name, f"Content-Range {said} for bytes {start} to {end}", start)
    first, last, size = map(int, found.groups())
    if first != start or last + 1 != min(end, size):
        problem = f"bytes {first} to {last + 1} of {size} for bytes {start} to {end}"
        raise wrong(name, problem, start)
    length = headers.get("Content-Length")
    if length is not None and length != str(last + 1 - first):
        raise wrong(name, f"Content-Length {show(length[:30])} for {last + 1 - first} bytes", start)
    return last + 1, size


def check_same(name: str, pin: Pin, found: Pin, offset: int) -> None:
    """Hold an answer against what the file was at first.

    Raises:
        DownloadError: it is another content.
    """
    if found.size != pin.size:
        raise changed(name, offset, f"it has {found.size} bytes and had {pin.size}")
    if found.etag != pin.etag:
        raise changed(name, offset, "its ETag is another one")
    if pin.etag is None and found.modified != pin.modified:
        raise changed(name, offset, "its time of modification is another one")


def unencoded(name: str, headers: Mapping[str, str]) -> None:
    """Refuse compressed bodies: their bytes are not the file's, and may be endless.

    Raises:
        DownloadError: the body is encoded although that was ruled out.
    """
    encoding = headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise wrong(name, f"Content-Encoding {show(encoding[:30])}, which was not asked for")


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that a server asks to wait: a number, or a date of its own."""
    said = headers.get("Retry-After", "").strip()
    if said.isascii() and said.isdigit() and len(said) < 8:
        return float(said)
    try:
        when = parsedate_to_datetime(said)
    except (ValueError, TypeError):
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return max(0.0, (when - datetime.now(UTC)).total_seconds())


def origin_of(address: str) -> tuple[str, str, int]:
    """Scheme, host and port: credentials are for these."""
    parts = urlsplit(address)
    return parts.scheme, (parts.hostname or "").lower(), _port(parts)


def next_address(name: str, address: str, location: str | None) -> str:
    """Where a redirect leads, if it may be followed.

    Raises:
        DownloadError: no address, another scheme, from https to http, with a password in it, or
            to an address of this machine's or its link's own services.
        Transient: its host has no address at the moment.
    """
    if not location or len(location) > MAX_LOCATION or _ODD.search(location):
        raise wrong(name, "a redirect to no address")
    try:
        target = urljoin(address, location)
        old, new = urlsplit(address), urlsplit(target)
        host, port = new.hostname or "", _port(new)
    except ValueError:
        raise wrong(name, "a redirect to no address") from None
    shown = show(shown_source(target))
    if new.scheme not in ("http", "https") or not host:
        raise wrong(name, f"a redirect to {shown}: only http and https are followed")
    if old.scheme == "https" and new.scheme == "http":
        raise wrong(name, f"a redirect from https to {shown}")
    if new.username is not None or new.password is not None:
        raise wrong(name, f"a redirect to {shown}, with credentials in it")
    if host.lower() != (old.hostname or "").lower():
        _check_addresses(name, old.hostname or "", host, port, shown)
    return target


def _check_addresses(name: str, old: str, host: str, port: int, shown: str) -> None:
    """Another host must not be the machine's own, its link's, or none at all."""
    for found in addresses_of(host, port):
        bad = found.is_link_local or found.is_multicast or found.is_unspecified
        if not bad and found.is_loopback:
            bad = not all(each.is_loopback for each in addresses_of(old, 0))
        if bad:
            raise wrong(name, f"a redirect to {shown}, which is {found}: not followed")


def addresses_of(host: str, port: int) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The addresses of a host, IPv4 ones inside IPv6 unwrapped.

    Raises:
        Transient: there are none.
    """
    try:
        found = socket.getaddrinfo(host, port or None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise Transient(f"the host {show(host)} has no address", unreached=True) from None
    out = []
    for *_, place in found:
        address = ipaddress.ip_address(str(place[0]).partition("%")[0])
        inner = getattr(address, "ipv4_mapped", None)
        out.append(address if inner is None else inner)
    return out


def _port(parts: SplitResult) -> int:
    return parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)


def wrong(name: str, what: str, offset: int | None = None) -> DownloadError:
    """The error of an answer that cannot be used."""
    return DownloadError(
        f"the server answered the request for {show(name)} with {what}",
        file=name,
        offset=offset,
        hint="the server, or something between it and here, does not keep to HTTP",
    )
