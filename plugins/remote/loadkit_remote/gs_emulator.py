"""A bucket of an emulator of Google Cloud Storage, by its JSON interface and without credentials.

``STORAGE_EMULATOR_HOST`` is what Google's own libraries go by. Emulators lack the interface (XML)
that real buckets are reached by here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlencode

from loadkit.errors import DownloadError
from loadkit.json_safe import parse_json
from loadkit.network.answers import Absent, Pin, wrong
from loadkit.network.patience import Deadline
from loadkit_remote.address import Address
from loadkit_remote.web_transport import WebTransport

__all__ = ["EmulatedBucket", "emulator_host"]

MAX_PAGE = 16 << 20  # bytes of one page of a listing
MAX_PAGES = 1000
_SECONDS = 60.0


def emulator_host() -> str:
    """The emulator's address; empty where there is none."""
    host = os.environ.get("STORAGE_EMULATOR_HOST", "").rstrip("/")
    return host if not host or "://" in host else f"http://{host}"


class EmulatedBucket(WebTransport):
    """The objects below a prefix of an emulator's bucket."""

    def __init__(self, host: str, bucket: str, prefix: str, address: str, timeout: float) -> None:
        root = f"{host}/{quote(bucket)}/{quote(prefix)}"
        super().__init__(Address(root, "", {}), timeout)
        self.prefix = prefix
        self._list = f"{host}/storage/v1/b/{quote(bucket)}/o"
        self._shown = address

    def shown(self, name: str) -> str:
        return f"{self._shown}/{self.prefix}{name}"

    def listing(self) -> Iterator[tuple[str, Pin]]:
        """Every object below the prefix with its name after it; raises as ``get``."""
        token: Any = None
        for _ in range(MAX_PAGES):
            query = {"prefix": self.prefix, "maxResults": "1000"}
            page = self._page(query | ({"pageToken": token} if token else {}))
            for item in page.get("items", ()):
                key, size = str(item["name"]), int(item["size"])
                if key.startswith(self.prefix):
                    yield key[len(self.prefix) :], Pin(size)
            token = page.get("nextPageToken")
            if not token:
                return

    def _page(self, query: dict[str, str]) -> dict[str, Any]:
        url = f"{self._list}?{urlencode(query)}"
        with self.client.open("", url, Deadline(_SECONDS)) as reply:
            if reply.status == 404:
                raise Absent("")
            if reply.status != 200:
                raise wrong("", f"status {reply.status} for a listing")
            data = reply.content(MAX_PAGE)
        found = parse_json(data, file="the listing", max_bytes=MAX_PAGE)
        if not isinstance(found, dict):
            raise DownloadError("the emulator's listing is no object")
        return found
