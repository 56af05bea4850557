"""Connections that look whom they reach, by a library that is not let write about them.

A name may lead elsewhere when it is looked up again, so a redirect is checked at the connection: no
request is sent to an address that ``check_reached`` refuses. The library would log whole addresses,
signatures too.
"""

from __future__ import annotations

import ipaddress
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection

from loadkit.network.addresses import IPAddress, Origin, addresses_of, check_reached

__all__ = ["pools", "watched"]

_thread = threading.local()


@contextmanager
def watched(name: str, first: Origin | None) -> Iterator[None]:
    """This thread's requests inside are not logged by the library, and kept out of networks.

    Args:
        name: the file that is asked for.
        first: the address that a redirect led away from; None: there was none, or a proxy connects.
    """
    _thread.inside, _thread.redirect = True, None if first is None else (name, first)
    try:
        yield
    finally:
        _thread.inside, _thread.redirect = False, None


def pools(proxy: str, headers: dict[str, str], connections: int) -> urllib3.PoolManager:
    """Pools of such connections, each of at most ``connections``; through a proxy or directly."""
    made = (
        urllib3.ProxyManager(proxy, num_pools=8, maxsize=connections, proxy_headers=headers)
        if proxy
        else urllib3.PoolManager(num_pools=8, maxsize=connections)
    )
    made.pool_classes_by_scheme = {"http": _Pool, "https": _SafePool}
    return made


class _Connection(HTTPConnection):
    """Looks whom it would reach before it connects, and whom it reached before each request."""

    def connect(self) -> None:
        if redirect := _redirect():
            self._check(redirect, addresses_of(self.host, self.port))
        super().connect()

    def request(self, *args: Any, **options: Any) -> None:
        if redirect := _redirect():
            if self.sock is None:
                self.connect()
            peer = str(self.sock.getpeername()[0]).partition("%")[0]
            self._check(redirect, [ipaddress.ip_address(peer)])
        super().request(*args, **options)

    def _check(self, redirect: tuple[str, Origin], addresses: list[IPAddress]) -> None:
        for address in addresses:
            check_reached(redirect[0], address, self.host, redirect[1])


class _SafeConnection(_Connection, HTTPSConnection):
    pass


def _redirect() -> tuple[str, Origin] | None:
    """What is asked for, and the address that a redirect led away from, if one did."""
    found: tuple[str, Origin] | None = getattr(_thread, "redirect", None)
    return found


class _Pool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Connection


class _SafePool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _SafeConnection


class _Filter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not getattr(_thread, "inside", False)


logging.getLogger("urllib3.connectionpool").addFilter(_Filter())
