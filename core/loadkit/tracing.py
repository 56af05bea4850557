"""Where a walk over checkpoint names reports what did not fit.

A recorder that wants all misfits of a load, not the first, sets a sink. Without one every report
is declined and the caller raises its own typed error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

__all__ = ["Misfit", "MisfitKind", "report_misfit", "set_sink"]

MisfitKind = Literal["UNEXPECTED", "SHAPE", "SKIPPED"]


@dataclass(frozen=True, slots=True)
class Misfit:
    """One checkpoint tensor that did not land, or was left out on purpose.

    Attributes:
        kind: UNEXPECTED (no place for it), SHAPE (its place is another shape) or SKIPPED (left
            out by a rule; ``message`` is the reason).
        name: the checkpoint tensor's name.
        target: the model parameter's dotted name, where one is known.
        message: what happened, complete.
        hint: what to do about it.
    """

    kind: MisfitKind
    name: str
    target: str | None
    message: str
    hint: str | None = None


_sink: Callable[[Misfit], bool] | None = None


def set_sink(sink: Callable[[Misfit], bool] | None) -> Callable[[Misfit], bool] | None:
    """Make ``sink`` the receiver of misfits; returns the one before it, to be set back."""
    global _sink
    before, _sink = _sink, sink
    return before


def report_misfit(
    kind: MisfitKind,
    *,
    name: str,
    target: str | None = None,
    message: str,
    hint: str | None = None,
) -> bool:
    """Tell the current recorder; True if it took the report, so that the caller goes on."""
    if _sink is None:
        return False
    return _sink(Misfit(kind, name, target, message, hint))
