"""Whether the load format can be used here; nothing of the library is imported."""

from __future__ import annotations

from loadkit.availability import library_state

__all__ = ["LIBRARY", "state"]

LIBRARY = "runai-model-streamer"


def state() -> str:
    """``ready``, or what it needs."""
    return library_state(LIBRARY)
