"""An address on the web, taken apart: the root, what follows a file's name, and who asks."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote, unquote, urlsplit

from loadkit.errors import OptionError
from loadkit.file_checks import show
from loadkit.network.addresses import user_header
from loadkit.sources.shown import shown_source

__all__ = ["Address"]

_KEPT = "/%:;@!$&'()*+,=?~"  # an address is taken as it is given, its escapes and its signature too


@dataclass(frozen=True)
class Address:
    """A root on the web: what stands before and after a file's name, and who asks.

    ``root`` ends with "/"; ``query`` is empty or begins with "?"; ``headers`` hold the credentials.
    """

    root: str
    query: str
    headers: dict[str, str]

    @classmethod
    def of(cls, uri: str) -> tuple[Address, str]:
        """The address of a URI's folder, and the last part of its path, "" for a folder.

        Raises:
            OptionError: it names no host.
        """
        try:
            parts = urlsplit(uri)
            host, port = parts.hostname, parts.port
            host = host if host is None or host.isascii() else host.encode("idna").decode()
        except ValueError:
            host = port = None
        if not host or parts.scheme.lower() not in ("http", "https"):
            raise OptionError(f"{show(shown_source(uri))} is no address of a web server")
        netloc = f"[{host}]" if ":" in host else host
        netloc += f":{port}" if port else ""
        folder, _, last = parts.path.rpartition("/")
        root = f"{parts.scheme.lower()}://{netloc}{quote(folder, safe=_KEPT)}/"
        query = f"?{quote(parts.query, safe=_KEPT)}" if parts.query else ""
        return cls(root, query, user_header("Authorization", parts)), unquote(last)

    def folder(self, name: str) -> Address:
        """A folder below."""
        return Address(f"{self.root}{quote(name)}/", self.query, self.headers)
