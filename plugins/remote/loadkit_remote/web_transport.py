"""The files below one address of a web server."""

from __future__ import annotations

from urllib.parse import quote

from loadkit.network import make_client
from loadkit.network.addresses import origin_of
from loadkit.network.http_transport import HttpTransport
from loadkit_remote.address import Address

__all__ = ["WebTransport"]


class WebTransport(HttpTransport):
    """The files below one address.

    Args:
        address: where; its credentials go to its own host alone.
        timeout: seconds of silence after which an attempt has failed.

    Raises:
        NotInstalledError: ``urllib3`` is missing.
    """

    def __init__(self, address: Address, timeout: float) -> None:
        credentials = {origin_of(address.root): address.headers}
        super().__init__(make_client(timeout, credentials))
        self.base = address

    def url_of(self, name: str) -> str:
        return f"{self.base.root}{quote(name)}{self.base.query}"
