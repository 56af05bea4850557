"""Where code that places weights tells a running plan about a tensor that has no place."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["MisfitKind", "report_misfit", "set_sink"]

MisfitKind = str
"""UNEXPECTED (it has no place), SHAPE, SKIPPED (left out for a reason), METADATA (read while
planning, for what it says of others), or a problem's own code."""
Sink = Callable[..., None]

_sink: Sink | None = None


def set_sink(sink: Sink | None) -> Sink | None:
    """Make ``sink(kind, name=, target=, message=, hint=)`` take misfits; returns the old one."""
    global _sink
    old, _sink = _sink, sink
    return old


def report_misfit(
    kind: MisfitKind,
    *,
    name: str,
    target: str | None = None,
    message: str,
    hint: str | None = None,
) -> bool:
    """Tell the plan under way that tensor ``name`` misfits; False if none is: then raise."""
    if _sink is None:
        return False
    _sink(kind, name=name, target=target, message=message, hint=hint)
    return True
