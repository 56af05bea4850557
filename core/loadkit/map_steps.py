"""Where a mapper sends a name, and by which rules: its answers as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from loadkit.name_rules import Kind
from loadkit.text import printable

__all__ = ["Explanation", "MappedName", "Step"]


class MappedName(NamedTuple):
    """Where a checkpoint tensor goes: a model name, and the part of it, if it is fused."""

    name: str
    shard_id: Any = None


@dataclass(frozen=True, slots=True)
class Step:
    """One rule that fired: ``before`` became ``after`` (None: dropped)."""

    kind: Kind
    pattern: str
    before: str
    after: str | None
    shard_id: Any = None

    def __str__(self) -> str:
        if self.after is None:
            return f"{self.kind} {self.pattern!r}: '{printable(self.before)}' is dropped"
        shard = "" if self.shard_id is None else f", shard {self.shard_id!r}"
        change = f"'{printable(self.before)}' -> '{printable(self.after)}'"
        return f"{self.kind} {self.pattern!r}: {change}{shard}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """Every rule that fired on ``name``, in order, and where it ended (None: dropped)."""

    name: str
    steps: tuple[Step, ...]
    result: MappedName | None

    def __str__(self) -> str:
        return "\n".join(map(str, self.steps)) or f"no rule matches '{printable(self.name)}'"
