"""Addresses as they are shown: without passwords, signatures and tokens."""

from __future__ import annotations

import os
import re

__all__ = ["shown_source"]

_URI = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+)://(?P<host>[^/?#]*)(?P<path>[^?#]*)")


def shown_source(source: str | os.PathLike[str]) -> str:
    """A source for people and records: of a URI its scheme, host and path, secrets left out.

    Whatever stands before an ``@`` in the host's part, and every query and fragment (a presigned
    address has its signature there), is shown as ``***``. A plain path stays as it is.
    """
    text = os.fspath(source)
    match = _URI.match(text)
    if match is None:
        return text
    host = match["host"]
    user, at, rest = host.rpartition("@")
    shown = f"{match['scheme']}://{'***@' + rest if at and user else rest}{match['path']}"
    tail = text[match.end() :]
    return f"{shown}{tail[0]}***" if tail else shown
