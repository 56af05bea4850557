"""What comes over a network: ranges of files, tried again, resumed, and held against the first.

A source gives a ``Transport`` (one attempt at a range), ``Transfers`` asks it until the bytes are
there or it is enough, and a ``RemoteFile`` reads by them. ``HttpTransport`` is the one for HTTP:
its rules stand here once, for every plugin that asks a web server.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from loadkit.errors import NotInstalledError

if TYPE_CHECKING:
    from loadkit.network.addresses import Origin
    from loadkit.network.http_client import HttpClient

__all__ = ["make_client"]


def make_client(
    timeout: float, credentials: Mapping[Origin, Mapping[str, str]] | None = None
) -> HttpClient:
    """The client of one source.

    Args:
        timeout: seconds of silence after which an attempt has failed.
        credentials: headers by origin; they are sent to that origin and to no other.

    Raises:
        NotInstalledError: ``urllib3`` is missing.
    """
    if find_spec("urllib3") is None:
        raise NotInstalledError(
            "requests over HTTP need the library 'urllib3', which is not installed",
            detail={"library": "urllib3", "extra": "http"},
            hint='pip install "loadkit-core[http]"',
        )
    from loadkit.network.http_client import HttpClient

    return HttpClient(timeout, credentials)
