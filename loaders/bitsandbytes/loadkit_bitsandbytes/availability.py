"""Whether the load format can be used here: strings only, nothing is imported."""

from __future__ import annotations

from loadkit.availability import library_state

__all__ = ["LIBRARY", "state"]

LIBRARY = "bitsandbytes"


def state() -> str:
    """``ready``, or what it needs."""
    return library_state(LIBRARY)
