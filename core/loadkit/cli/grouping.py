"""A plan's rows with equal layers folded: ``layers.{0-31}.mlp.up_proj.weight``, one line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["GROUP_HEADERS", "fold", "grouped", "ranges"]

GROUP_HEADERS = ["rows", "kind", "exact", "tensor", "source", "parameter", "target"]
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a dotted component that is a number


def grouped(rows: Iterable[Mapping[str, Any]]) -> list[list[object]]:
    """One line (as ``GROUP_HEADERS``) for all rows that differ only in numbers of their names.

    Rows fold when kind, exactness, region sizes and the target's offset agree; lines come in the
    order of their first rows.
    """
    groups: dict[tuple[object, ...], list[tuple[str, str]]] = {}
    for row in rows:
        tensor, parameter = str(row["tensor"] or ""), str(row["parameter"] or "")
        source, target = row["source"] or {}, row["target"] or {}
        key = (
            row["kind"],
            row["exact"],
            _NUMBER.sub("#", tensor),
            _size(source),
            _NUMBER.sub("#", parameter),
            _size(target),
            target.get("offset"),
        )
        groups.setdefault(key, []).append((tensor, parameter))
    return [
        [
            len(names),
            kind,
            exact,
            fold([tensor for tensor, _ in names]) or None,
            source,
            fold([parameter for _, parameter in names]) or None,
            _at(target, offset),
        ]
        for (kind, exact, _, source, _, target, offset), names in groups.items()
    ]


def fold(names: Sequence[str]) -> str:
    """Names that differ only in numbers, as one: each place shows the range it takes."""
    places = [
        sorted({int(number) for number in numbers if len(number) < 20})
        for numbers in zip(*(_NUMBER.findall(name) for name in names), strict=True)
    ]
    values = iter(places)

    def shown(match: re.Match[str]) -> str:
        numbers = next(values)
        return match[0] if len(numbers) < 2 else "{" + ranges(numbers) + "}"

    return _NUMBER.sub(shown, names[0])


def ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers as ranges: ``0-3,7``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _size(region: Mapping[str, Any]) -> str | None:
    size = region.get("size")
    return None if size is None else str(list(size))


def _at(size: object, offset: object) -> str | None:
    """``[64, 576] @ 36864``; a region that starts its parameter needs no offset."""
    return (
        f"{size} @ {offset}" if size is not None and offset else None if size is None else str(size)
    )
