"""Whether the load format can be used here; nothing of the library is imported."""

from __future__ import annotations

from loadkit.availability import library_state

__all__ = ["INSTALL", "LIBRARY", "state"]

LIBRARY = "modelexpress"
INSTALL = 'pip install --no-deps "modelexpress>=0.7,<0.8"'


def state() -> str:
    """``ready``, or what it needs. Files of a server need no accelerator."""
    return library_state(LIBRARY)
