"""Names that differ in numbers alone (layers, experts) take one way: the first one's.

That holds where no rule looks at numbers: no regex, no renamed name, no numeric component.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from loadkit.map_steps import MappedName

if TYPE_CHECKING:
    from loadkit.mapper import WeightsMapper

__all__ = ["KnownWays"]


class KnownWays:
    """Where names went, without their numbers. Off where a rule looks at numbers."""

    MOST = 1 << 16  # ways that are remembered

    def __init__(self, mapper: WeightsMapper) -> None:
        looks = [
            part
            for table in mapper.tables.values()
            for run, rule in table.runs.items()
            for part in (*run, *(rule.target or ()))
        ]
        self.off = bool(mapper.orig_to_new_regex or mapper.orig_to_new_rename) or any(
            part.isdigit() for part in looks
        )
        self.ways: dict[tuple[str, ...], tuple[str, Any]] = {}

    def find(self, name: str) -> MappedName | None:
        """Where a name goes, if one like it went there before."""
        if self.off:
            return None
        shape, numbers = _numbers_of(name)
        way = self.ways.get(shape)
        return None if way is None else MappedName(way[0].format(*numbers), way[1])

    def learn(self, name: str, mapped: MappedName) -> None:
        """Remember the way of all names like this one."""
        if self.off or "{" in name or "}" in name or len(self.ways) >= self.MOST:
            return
        shape, numbers = _numbers_of(name)
        parts = mapped.name.split(".")
        if [part for part in parts if part.isdigit()] == numbers and "{" not in mapped.name:
            way = ".".join("{}" if part.isdigit() else part for part in parts)
            self.ways[shape] = way, mapped.shard_id


_NUMBER = re.compile(r"(?:^|(?<=\.))([0-9]+)(?=\.|$)")  # a whole component


def _numbers_of(name: str) -> tuple[tuple[str, ...], list[str]]:
    """What stands between the numeric components of a name, and those."""
    parts = _NUMBER.split(name)
    return tuple(parts[::2]), parts[1::2]
