"""Whether the load format can be used here: strings only, nothing is imported."""

from __future__ import annotations

from importlib.util import find_spec

__all__ = ["state"]


def state() -> str:
    """``ready``, or what it needs."""
    return "ready" if find_spec("bitsandbytes") is not None else "needs bitsandbytes"
