"""Names that differ in numbers alone (layers, experts) take one way: the first one's.

That holds where no rule looks at numbers: no regex, no renamed name, no numeric component.
"""

from __future__ import annotations

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
        self.ways: dict[str, tuple[str, int, Any]] = {}

    def find(self, name: str) -> MappedName | None:
        """Where a name goes, if one like it went there before."""
        if self.off:
            return None
        shape, numbers = _numbers_of(name)
        way = self.ways.get(shape)
        if way is None or way[1] != len(numbers):
            return None
        return MappedName(way[0].format(*numbers), way[2])

    def learn(self, name: str, mapped: MappedName) -> None:
        """Remember the way of all names like this one."""
        if self.off or "{" in name or "}" in name or len(self.ways) >= self.MOST:
            return
        shape, numbers = _numbers_of(name)
        parts = mapped.name.split(".")
        if [part for part in parts if part.isdigit()] == numbers and "{" not in mapped.name:
            way = ".".join("{}" if part.isdigit() else part for part in parts)
            self.ways[shape] = way, len(numbers), mapped.shard_id


def _numbers_of(name: str) -> tuple[str, list[str]]:
    """A name with its numeric components left out, and those."""
    numbers: list[str] = []
    parts = name.split(".")
    for at, part in enumerate(parts):
        if part.isdigit():
            numbers.append(part)
            parts[at] = ""
    return ".".join(parts), numbers
