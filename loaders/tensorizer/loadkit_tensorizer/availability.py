"""Whether load format ``tensorizer`` can be used here: strings only, nothing is imported."""

from __future__ import annotations

from loadkit.availability import library_state

__all__ = ["LIBRARY", "state"]

LIBRARY = "tensorizer"


def state() -> str:
    """``ready``, or what is missing.

    Plain files are read without the library; it is needed to save, and for what is encrypted or
    lies behind a URI.
    """
    return library_state(LIBRARY)
