"""A ``WeightsMapper`` run backwards: from a model's names to the checkpoint's."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from loadkit.name_rules import Kind, Parts, Rule, Table

if TYPE_CHECKING:
    from loadkit.mapper import WeightsMapper

__all__ = ["ReverseMapper"]


class ReverseMapper:
    """Undoes a mapper, name by name. Get one from ``WeightsMapper.reverse()``.

    Candidates are made by undoing each kind, last one first, and each is checked by mapping it
    forward again: what it returns always leads back to the name it was asked for. Regex rules
    cannot be undone; names they made have no way back.
    """

    def __init__(self, mapper: WeightsMapper, known: Collection[str] = ()) -> None:
        self._mapper = mapper
        self._known = frozenset(known)
        self._targets = {kind: _by_target(table) for kind, table in mapper.tables.items()}
        self._renamed: dict[str, list[str]] = {}
        for old, new in mapper.orig_to_new_rename.items():
            if new is not None:
                self._renamed.setdefault(new, []).append(old)

    def map_name(self, name: str, shard_id: Any = None) -> str | None:
        """The checkpoint's name of ``name`` (its part ``shard_id``), or None if it is not unique.

        Where several names lead there: one that is known from a checkpoint, else the one on which
        the most rules fire (a rename before all), of these the one most rules leave as it is.
        With ``"model.": "model."`` or ``".weight": ".weight"`` a mapper says that this spelling,
        of those it accepts, is the one to save.
        """
        found: set[str] = set()
        for plain in self._undo_stacked(name, shard_id):
            found.update(self._renamed.get(plain, ()))
            found.update(self._undo_patterns(plain))
        good = {c for c in found if self._mapper.map_name(c) == (name, shard_id)}
        ranked = sorted(((*self._firings(c), c) for c in good & self._known or good), reverse=True)
        if not ranked or (len(ranked) > 1 and ranked[0][:3] == ranked[1][:3]):
            return None
        return ranked[0][3]

    def shards(self, name: str) -> list[Any]:
        """The shard ids that the stacked rules give to parts of parameter ``name``, in order."""
        ids = [rule.shard_id for _, rule in self._matches("stacked", tuple(name.split(".")))]
        return list(dict.fromkeys(ids))

    def _firings(self, name: str) -> tuple[bool, int, int]:
        """Whether it is renamed, how many rules fire, how many of them leave it as it is."""
        steps = self._mapper.explain(name).steps
        renamed = any(step.kind == "rename" for step in steps)
        return renamed, len(steps), sum(step.before == step.after for step in steps)

    def _undo_patterns(self, name: str) -> set[str]:
        """The name and everything that prefix, suffix and substr could have made it from."""
        level = {name}
        ends: tuple[Kind, Kind] = ("suffix", "prefix")
        for kind in ends:
            level |= {
                ".".join(parts[:start] + rule.run + parts[start + len(rule.target or ()) :])
                for parts in [tuple(n.split(".")) for n in level]
                for start, rule in self._matches(kind, parts)
            }
        for before in list(level):
            level |= self._undo_substr(tuple(before.split(".")))
        level.discard("")
        return level

    def _undo_substr(self, parts: Parts) -> set[str]:
        """Each rule undone by itself, and all of them at once from left to right."""
        found = set()
        matches = list(self._matches("substr", parts))
        every, end = parts, len(parts) + 1
        for start, rule in sorted(matches, key=lambda m: (-m[0], -len(m[1].target or ()))):
            stop = start + len(rule.target or ())
            found.add(".".join(parts[:start] + rule.run + parts[stop:]))
            if stop <= end:
                every, end = every[:start] + rule.run + every[stop:], start
        return found | {".".join(every)}

    def _undo_stacked(self, name: str, shard_id: Any) -> Iterator[str]:
        """The names of the part ``shard_id`` of a fused ``name``; without one, the name itself."""
        if shard_id is None:
            yield name
            return
        parts = tuple(name.split("."))
        for start, rule in self._matches("stacked", parts):
            if rule.shard_id == shard_id:
                stop = start + len(rule.target or ())
                yield ".".join(parts[:start] + rule.run + parts[stop:])

    def _matches(self, kind: Kind, parts: Parts) -> Iterator[tuple[int, Rule]]:
        """Where a target of this kind stands in a name, where its rule could have put it."""
        targets = self._targets[kind]
        for length in {len(target) for target in targets}:
            last = len(parts) - length
            starts = {"prefix": range(1), "suffix": range(last, last + 1)}.get(
                kind, range(last + 1)
            )
            for start in starts:
                if 0 <= start <= last:
                    for rule in targets.get(parts[start : start + length], ()):
                        yield start, rule


def _by_target(table: Table) -> dict[Parts, list[Rule]]:
    """A table's rules by what they make."""
    found: dict[Parts, list[Rule]] = {}
    for rule in table.runs.values():
        if rule.target is not None:
            found.setdefault(rule.target, []).append(rule)
    return found
