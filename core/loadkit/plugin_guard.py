"""Importing and calling what others wrote: a failure is undone, recorded, and stays theirs."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, TypeVar

from loadkit.entry_index import Row, index
from loadkit.errors import LoadkitError, PluginError
from loadkit.known_names import canonical
from loadkit.text import printable

__all__ = [
    "Failure",
    "current_origin",
    "failures",
    "forget_failures",
    "guarded",
    "load_row",
    "mismatch",
    "on_undo",
    "report",
    "strict",
]

logger = logging.getLogger("loadkit")
Result = TypeVar("Result")
Undo = Callable[[], object]


@dataclass(frozen=True)
class Failure:
    """What a plugin failed at: its row, and the cause."""

    row: Row
    error: BaseException


_failures: dict[Row, Failure] = {}
_warned: set[Row] = set()
_journal: ContextVar[list[Undo] | None] = ContextVar("loadkit_journal", default=None)
_origin: ContextVar[Row | None] = ContextVar("loadkit_origin", default=None)


def strict() -> bool:
    """Whether LOADKIT_STRICT_PLUGINS asks for an error where a broken plugin is met."""
    return os.environ.get("LOADKIT_STRICT_PLUGINS", "").strip().lower() not in ("", "0", "false")


def failures() -> list[Failure]:
    """Every failure since the start, or since ``forget_failures``."""
    return list(_failures.values())


def forget_failures() -> None:
    """Forget the failures, so that the next use tries again."""
    _failures.clear()
    _warned.clear()


def on_undo(undo: Undo) -> None:
    """Have ``undo`` called if the plugin that runs now fails."""
    journal = _journal.get()
    if journal is not None:
        journal.append(undo)


def current_origin() -> Row | None:
    """The row whose code runs now, or None."""
    return _origin.get()


@contextmanager
def _under(row: Row) -> Iterator[list[Undo]]:
    """What runs inside belongs to ``row``; yields its journal of undos."""
    journal: list[Undo] = []
    tokens = _journal.set(journal), _origin.set(row)
    try:
        yield journal
    finally:
        _journal.reset(tokens[0])
        _origin.reset(tokens[1])


def guarded(row: Row, action: Callable[[], Result], what: str) -> Result:
    """``action()``, whatever it raises turned into a PluginError and its registrations undone.

    Only a KeyboardInterrupt of the user passes as it is; a subclass of it is the plugin's.

    Args:
        row: whose code it is.
        action: what to do.
        what: what was tried, for the error: ``importing it``.

    Raises:
        PluginError: names the row, its distribution and version, chained to the cause.
    """
    with _under(row) as journal:
        try:
            return action()
        except BaseException as error:
            for undo in reversed(journal):
                undo()
            if type(error) is KeyboardInterrupt:
                raise
            _failures[row] = Failure(row, error)
            raise _plugin_error(row, what, error) from error


def _plugin_error(row: Row, what: str, error: BaseException) -> PluginError:
    cause = f"{type(error).__name__}: {printable(error)}"
    return PluginError(
        f"{row.name!r} of {row.origin} cannot be used: {what} raised {cause}",
        detail={
            "name": row.name,
            "value": row.value,
            "distribution": row.distribution,
            "version": row.version,
            "cause": cause,
        },
    )


def report(error: LoadkitError, row: Row) -> None:
    """A discovered plugin is broken: one warning, or the error itself in strict mode."""
    if strict():
        raise error
    if row not in _warned:
        _warned.add(row)
        logger.warning("plugin ignored: %s", error)


def load_row(row: Row) -> Any:
    """The object a row names; its distribution's requirement on the core is checked first.

    Raises:
        PluginError: the row is broken, needs another core, or its import failed (the recorded
            failure is raised again, chained to the same cause).
    """
    if row.state != "ready":
        raise PluginError(f"{row.name!r} of {row.origin} cannot be used: {row.problem}")
    problem = mismatch(row)
    if problem:
        raise PluginError(f"{row.name!r} of {row.origin} cannot be used: {problem}")
    known = _failures.get(row)
    if known is not None:
        raise _plugin_error(row, "importing it", known.error) from known.error
    return guarded(row, lambda: import_value(row.value), "importing it")


def import_value(value: str) -> Any:
    """The object at ``module:attribute``, or the module where there is no attribute."""
    module, _, attributes = value.partition(":")
    found: Any = import_module(module.strip())
    for attribute in filter(None, attributes.strip().split(".")):
        found = getattr(found, attribute)
    return found


def mismatch(row: Row) -> str | None:
    """Why a row's distribution does not go with this core, or None."""
    installed = index()
    if installed.core is None:
        return None
    return _mismatch(installed.requires.get(canonical(row.distribution), ()), installed.core)


@lru_cache(maxsize=256)
def _mismatch(requires: tuple[str, ...], version: str) -> str | None:
    """Which of a distribution's requirements this version of the core does not meet, or None."""
    for line in requires:
        if not canonical(line).startswith("loadkit-core"):
            continue
        from packaging.requirements import InvalidRequirement, Requirement

        try:
            wanted = Requirement(line)
            if canonical(wanted.name) != "loadkit-core":
                continue
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                continue
            good = wanted.specifier.contains(version, prereleases=True)
        except (InvalidRequirement, ValueError) as error:
            return f"its requirement {printable(line, 80)!r} cannot be read: {printable(error)}"
        if not good:
            return f"it requires {printable(line, 80)}, and loadkit-core is {version}"
    return None
