"""Whether the format can be used here; imported by ``loadkit formats``, so no torch is."""

from __future__ import annotations

__all__ = ["state"]


def state() -> str:
    """Always: it needs no library. With one, ``loadkit.availability.library_state`` looks."""
    return "ready"
