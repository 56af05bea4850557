"""Patterns of file names, as ``ignore_patterns`` and ``allow_patterns_overrides`` have them."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

__all__ = ["first_fit", "fits"]


def fits(name: str, pattern: str) -> bool:
    """Whether a name relative to the source's root, with "/", is what a pattern means.

    ``*``, ``?`` and ``[...]`` stay within one folder's or file's name; ``**`` is any number of
    folders, none too (``original/**/*``). Case counts.
    """
    parts = name.split("/")
    reached = {0}  # how many parts what was looked at of the pattern may have used
    for wanted in pattern.split("/"):
        if wanted == "**":
            reached = set(range(min(reached, default=len(parts) + 1), len(parts) + 1))
        else:
            reached = {
                at + 1 for at in reached if at < len(parts) and fnmatchcase(parts[at], wanted)
            }
    return len(parts) in reached


def first_fit(name: str, patterns: Iterable[str]) -> str | None:
    """The first pattern that a name fits; None: it fits none."""
    return next((pattern for pattern in patterns if fits(name, pattern)), None)
