"""Whether load format ``dcp`` can be used here: strings only, nothing is imported."""

from __future__ import annotations

from loadkit.availability import library_state

__all__ = ["LIBRARY", "state"]

LIBRARY = "torch"


def state() -> str:
    """``ready``: folders are read by loadkit, and written by torch's own ``torch.save``."""
    return library_state(LIBRARY)
