"""Untrusted names made safe to show, and the nearest of some names.

A name from a file is data: it is never a path, never a format string and never printed raw.
"""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable

__all__ = ["nearest", "printable"]

_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\\": "\\\\"}
# Control, format (bidi and zero-width are here), surrogate, private, unassigned, separators.
_UNSAFE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
_LONGEST_COMPARED = 128


def printable(name: object, limit: int = 200, *, ascii_only: bool = True) -> str:
    """``name`` as one line that cannot steer a terminal or pass for another name.

    Args:
        name: untrusted text (anything else is turned into text first).
        limit: most characters of the answer; a longer name ends with its full length.
        ascii_only: escape every non-ASCII character, so that no look-alike letter passes for
            another. Give False for paths the user typed: then only control, direction,
            invisible and surrogate characters are escaped.
    """
    text = name if isinstance(name, str) else str(name)
    if len(text) <= limit and text.isascii() and text.isprintable() and "\\" not in text:
        return text
    shown: list[str] = []
    room = limit
    for char in text[: limit + 1]:
        piece = _escape(char, ascii_only)
        room -= len(piece)
        if room < 0:
            break
        shown.append(piece)
    else:
        return "".join(shown)
    tail = f"... ({len(text)} characters)"
    while shown and sum(map(len, shown)) + len(tail) > limit:
        shown.pop()
    return "".join(shown) + tail


def _escape(char: str, ascii_only: bool) -> str:
    """One character, escaped where it must be."""
    if char in _ESCAPES:
        return _ESCAPES[char]
    code = ord(char)
    if 0x20 <= code < 0x7F:
        return char
    if code >= 0xA0 and not ascii_only and unicodedata.category(char) not in _UNSAFE:
        return char
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def nearest(name: str, candidates: Iterable[str], n: int = 3) -> list[str]:
    """Up to ``n`` of ``candidates`` that ``name`` may have meant, best first.

    Case and the difference between ``-`` and ``_`` do not count; a candidate that ``name`` begins
    or ends is near too (``runai`` finds ``runai_streamer``).
    """
    wanted = _fold(name)
    folded: dict[str, str] = {}
    for candidate in candidates:
        folded.setdefault(_fold(candidate), candidate)
    if wanted in folded:
        return [folded[wanted]]
    found = difflib.get_close_matches(wanted, folded, n=n, cutoff=0.6)
    if len(wanted) >= 3:
        parts = (key for key in sorted(folded) if key.startswith(wanted) or key.endswith(wanted))
        found += [key for key in parts if key not in found]
    return [folded[key] for key in found[:n]]


def _fold(name: str) -> str:
    """A name as it is compared."""
    return name[:_LONGEST_COMPARED].lower().replace("-", "_")
