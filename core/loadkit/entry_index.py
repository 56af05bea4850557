"""The index of what is installed: entry points of every distribution, read, never imported.

The metadata files are read by this module itself, line by line, so that a broken line costs one
name and a broken file costs one distribution.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import Distribution
from pathlib import Path

from loadkit.errors import UnknownNameError
from loadkit.known_names import FIRST_PARTY, canonical
from loadkit.text import nearest, printable

__all__ = ["GROUPS", "Index", "Row", "core_version", "index", "refresh"]

logger = logging.getLogger("loadkit")

# entry-point group -> the table's name
GROUPS = {
    "loadkit.loaders": "loaders",
    "loadkit.models": "models",
    "loadkit.quantization": "quantization",
    "loadkit.sources": "sources",
    "loadkit.readers": "readers",
    "loadkit.availability": "availability",  # whether a load format can be used here
    "loadkit": "plugins",
}
ALLOW = "LOADKIT_PLUGINS"
BLOCK = "LOADKIT_DISABLE_PLUGINS"

_MAX_BYTES = 4 << 20  # of one entry_points.txt
_VALUE = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\s*:\s*([A-Za-z_]\w*(?:\.\w+)*))?")
_EXTRAS = re.compile(r"\s*\[[^\]]*\]\s*$")


@dataclass(frozen=True, slots=True)
class Row:
    """One entry point: ``value`` is ``module:attribute``, ``problem`` why it cannot be used."""

    group: str
    name: str
    value: str
    distribution: str
    version: str
    problem: str = ""
    state: str = "ready"  # or broken, stale, disabled

    @property
    def origin(self) -> str:
        """Distribution, version and value, for people."""
        return f"{self.distribution} {self.version} ({printable(self.value, 120)})"


@dataclass(frozen=True)
class Index:
    """All rows of the groups of ``GROUPS``, and what is odd about the installation."""

    rows: tuple[Row, ...] = ()
    duplicates: tuple[str, ...] = ()  # one sentence per distribution with two records
    unknown_allowed: tuple[str, ...] = ()  # names in LOADKIT_PLUGINS that nothing answers to
    requires: dict[str, tuple[str, ...]] = field(default_factory=dict)
    core: str | None = None  # the core's own version, as ``core_version`` says it

    @cached_property
    def by_name(self) -> dict[tuple[str, str], list[Row]]:
        """Rows by (group, name)."""
        found: dict[tuple[str, str], list[Row]] = {}
        for row in self.rows:
            found.setdefault((row.group, row.name), []).append(row)
        return found

    def of_group(self, group: str) -> list[Row]:
        """The rows of one group, sorted by name and distribution."""
        return [row for row in self.rows if row.group == group]

    def version_of(self, distribution: str) -> str | None:
        """The version of a distribution that brings something; None where none does."""
        return next(
            (r.version for r in self.rows if r.distribution == distribution and r.state == "ready"),
            None,
        )

    def check_allowed(self) -> None:
        """Raise UnknownNameError if LOADKIT_PLUGINS names what is not installed."""
        if not self.unknown_allowed:
            return
        third = {canonical(row.distribution) for row in self.rows} - FIRST_PARTY
        name = self.unknown_allowed[0]
        near = nearest(name, third, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        shown = ", ".join(sorted(third)) or "none"
        raise UnknownNameError(
            f"{ALLOW} names {printable(name, 80)!r}, and no installed plugin is called so; "
            f"installed: {shown}{hint}",
            detail={"asked": printable(name), "installed": sorted(third), "nearest": near},
        )


_cache: tuple[object, Index] | None = None


def index() -> Index:
    """The index of ``sys.path``; read again when that, or a folder of it, changes."""
    global _cache
    key = (tuple(sys.path), _times(), os.environ.get(ALLOW), os.environ.get(BLOCK))
    if _cache is None or _cache[0] != key:
        _cache = (key, _read())
    return _cache[1]


def refresh() -> None:
    """Forget the index: the next use reads the metadata again."""
    global _cache
    _cache = None


def core_version() -> str | None:
    """The installed core's version, or None if it runs from a bare folder."""
    try:
        return importlib.metadata.version("loadkit-core")
    except importlib.metadata.PackageNotFoundError:
        return None


def _times() -> tuple[int, ...]:
    times = []
    for entry in sys.path:
        try:
            times.append(os.stat(entry or ".").st_mtime_ns)  # noqa: PTH116 - called often
        except (OSError, ValueError):
            times.append(0)
    return tuple(times)


def _read() -> Index:
    rows: list[Row] = []
    duplicates: list[str] = []
    requires: dict[str, tuple[str, ...]] = {}
    for name in sorted({_name(dist) for dist in _ours(importlib.metadata.distributions())}):
        first, *others = _records(name)
        active = _rows(first)
        rows += active
        requires[canonical(name)] = _requires(first)
        for other in others:
            stale = _rows(other)
            if _version(other) == _version(first) and stale == active:
                continue  # an editable install beside its own build folder
            duplicates.append(
                f"{name} has two metadata records: {_version(first)} in {_folder(first)} is used, "
                f"{_version(other)} in {_folder(other)} is stale: remove it"
            )
            used = {(row.group, row.name) for row in active}
            problem = f"the record of {name} {_version(other)} in {_folder(other)} is stale"
            rows += [
                replace(row, state="stale", problem=problem)
                for row in stale
                if (row.group, row.name) not in used
            ]
    rows, unknown = _apply_lists(rows)
    rows.sort(key=lambda row: (row.group, row.name, row.distribution))
    return Index(tuple(rows), tuple(duplicates), unknown, requires, core_version())


def _ours(found: Iterable[Distribution]) -> Iterable[Distribution]:
    """The distributions whose entry points speak of loadkit."""
    return (dist for dist in found if "loadkit" in (_entry_text(dist) or ""))


def _entry_text(dist: Distribution) -> str | None:
    """entry_points.txt, or None; undecodable bytes are replaced, and fail line by line."""
    path = getattr(dist, "_path", None)
    try:
        if isinstance(path, Path):
            file = path / "entry_points.txt"
            if not file.is_file() or file.stat().st_size > _MAX_BYTES:
                return None
            return file.read_text(encoding="utf-8", errors="replace")
        return dist.read_text("entry_points.txt")
    except (OSError, UnicodeError, KeyError):
        return None


def _name(dist: Distribution) -> str:
    try:
        name = dist.metadata["Name"]
    except (OSError, UnicodeError, KeyError, TypeError):
        name = None
    if not isinstance(name, str) or not name:
        name = Path(str(getattr(dist, "_path", "unknown"))).name.split("-")[0]
    return canonical(printable(name, 100))


def _version(dist: Distribution) -> str:
    try:
        version = dist.metadata["Version"]
    except (OSError, UnicodeError, KeyError, TypeError):
        version = None
    return printable(version, 40) if isinstance(version, str) and version else "unknown"


def _folder(dist: Distribution) -> str:
    return printable(str(dist.locate_file("")), 200, ascii_only=False)


def _records(name: str) -> list[Distribution]:
    """All metadata records of a distribution: as an import would find them, newest first."""
    found = list(importlib.metadata.distributions(name=name))
    folders = list(dict.fromkeys(_folder(dist) for dist in found))

    def rank(dist: Distribution) -> tuple[int, int, tuple[int, ...]]:
        egg = str(getattr(dist, "_path", "")).endswith(".egg-info")
        numbers = tuple(-int(part) for part in re.findall(r"\d{1,9}", _version(dist)))
        return folders.index(_folder(dist)), egg, numbers

    return sorted(found, key=rank)


def _requires(dist: Distribution) -> tuple[str, ...]:
    try:
        return tuple(dist.requires or ())
    except (OSError, UnicodeError, KeyError, ValueError):
        return ()


def _rows(dist: Distribution) -> list[Row]:
    """A distribution's rows; a line that is no entry point is a broken row."""
    rows: list[Row] = []
    group = ""
    for number, raw in enumerate((_entry_text(dist) or "").splitlines(), 1):
        line = raw.strip()
        if not line or line[0] in "#;":
            continue
        if line.startswith("["):
            group = line[1:].rstrip("]").strip()
            continue
        if group not in GROUPS:
            continue
        name, equals, value = (part.strip() for part in line.partition("="))
        value = _EXTRAS.sub("", value)
        row = Row(group, printable(name, 200), value, _name(dist), _version(dist))
        if not equals or not name or not _VALUE.fullmatch(value):
            problem = f"line {number} of its entry_points.txt is no entry point"
            row = replace(row, state="broken", problem=f"{problem}: {printable(line, 80)}")
        elif group == "loadkit.loaders" and name == "auto":
            problem = "'auto' is a decision, never a load format"
            row = replace(row, state="broken", problem=problem)
        rows.append(row)
    return rows


def _apply_lists(rows: list[Row]) -> tuple[list[Row], tuple[str, ...]]:
    """Rows with those of switched-off distributions marked, and the unknown names allowed."""
    allowed, blocked = _listed(ALLOW), _listed(BLOCK)
    installed = {canonical(row.distribution) for row in rows}
    for name in sorted((blocked or set()) - installed):
        logger.warning("%s names %r, which is not installed", BLOCK, printable(name))
    marked = []
    for row in rows:
        name = canonical(row.distribution)
        why = ""
        if blocked is not None and name in blocked:
            why = f"{BLOCK} names {name}"
        elif allowed is not None and name not in allowed and name not in FIRST_PARTY:
            why = f"{ALLOW} does not name {name}"
        marked.append(replace(row, state="disabled", problem=why) if why else row)
    return marked, tuple(sorted((allowed or set()) - installed - FIRST_PARTY))


def _listed(variable: str) -> set[str] | None:
    """The distributions an environment variable lists; None if it is not set."""
    text = os.environ.get(variable)
    if text is None:
        return None
    return {canonical(part.strip()) for part in text.split(",") if part.strip()}
