"""A table of names and the classes they stand for.

A name is looked up among this process's registrations, then in the index of what is installed,
then among what the hook plugins register. Only the hit is imported.
"""

from __future__ import annotations

import re
import sys
import threading
import warnings
from dataclasses import replace
from typing import Any

from loadkit.claims import HERE, Entry, Local, same_class
from loadkit.entry_index import Row, index
from loadkit.errors import (
    ConflictError,
    LoadkitError,
    NotInstalledError,
    OptionError,
    PluginError,
    UnknownNameError,
    UsageError,
)
from loadkit.known_names import KNOWN, pip_line
from loadkit.plugin_guard import (
    current_origin,
    failures,
    guarded,
    import_value,
    load_row,
    mismatch,
    on_undo,
    report,
)
from loadkit.text import nearest, printable

__all__ = ["Entry", "NameTable", "RegistrationWarning"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+\-]{0,127}")
_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


class RegistrationWarning(UserWarning):
    """A registration that processes started from here will not have."""


class NameTable:
    """Names of one kind, and the classes they stand for.

    Args:
        kind: the table's own name: ``loaders``.
        group: the entry-point group that fills it.
        noun: what a name is, for errors: ``load format``.
        base: ``module:Class`` that values must derive from; None to accept any object.
    """

    def __init__(self, kind: str, group: str, noun: str, base: str | None = None) -> None:
        self.kind = kind
        self.group = group
        self.noun = noun
        self.base = base
        self._local: dict[str, Local] = {}
        self._contested: dict[str, list[str]] = {}  # by hook plugins: name -> claims
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"NameTable({self.kind!r}, {len(self.names())} names)"

    def register(self, name: str, value: object, *, override: bool = False) -> None:
        """Give ``name`` to a class, or to the class at ``"module:Class"``, in this process.

        Raises:
            OptionError: no usable name, or no usable value.
            ConflictError: another value or an installed distribution has it; ``override`` wins.
                A hook plugin goes on: the name becomes an error for who asks for it.
        """
        self._check_registration(name, value)
        if not isinstance(value, str) and getattr(value, "__module__", None) == "__main__":
            warnings.warn(
                f"{name!r} is registered as a class of __main__: processes started by spawn "
                'will not have it; register "module:Class", or through an entry point of the '
                f"group {self.group}",
                RegistrationWarning,
                stacklevel=3,  # this method is called by a decorator, or by the model registry
            )
        plugin = current_origin()
        new = Local(value, override, plugin)
        with self._lock:
            old = self._local.get(name)
            if not override:
                claims = [old.origin] if old and not same_class(old.path, new.path) else []
                if old is None or not old.override:
                    rows = self._rows(name)
                    claims += [row.origin for row in rows if not same_class(row.value, new.path)]
                if claims and plugin is not None and plugin.group == "loadkit":
                    self._contest(name, [*claims, new.origin], plugin)
                    return
                if claims:
                    raise self._conflict(name, [*claims, new.origin])
                if old is not None and old.override:
                    new = Local(value, True, new.row)
            self._local[name] = new
        on_undo(lambda: self._restore(name, new, old))

    def lookup(self, name: str) -> object:
        """The class ``name`` stands for; imports that one and no other.

        Raises:
            UnknownNameError: nobody has it: names the nearest, and what is installed.
            NotInstalledError: it is known, and its distribution is missing: says the pip line.
            ConflictError: two distributions claim it: names both.
            PluginError: its import failed; chained to the cause.
        """
        found = self._find(name)
        if found is None:
            from loadkit import plugins

            plugins.load()
            found = self._find(name)
        if found is None:
            raise self.missing(name)
        if isinstance(found, Row):
            return self._checked(load_row(found), found)
        if isinstance(found.value, str):
            row = found.row or Row(self.group, name, found.value, HERE, "")
            value = found.value
            return self._checked(guarded(row, lambda: import_value(value), "importing it"), row)
        return found.value

    def has(self, name: str) -> bool:
        """Whether somebody claims ``name``, plugins' registrations included; imports no value.

        A name that two claim, or whose entry point is broken, counts: looking it up says so.
        """
        if self._claimed(name):
            return True
        from loadkit import plugins

        plugins.load()
        return self._claimed(name)

    def where(self, name: str) -> Any:
        """What ``name`` stands for, not imported: a Row, a ``"module:Class"``, or a class."""
        found = self._find(name)
        if found is None:
            raise self.missing(name)
        return found if isinstance(found, Row) else found.value

    def names(self) -> list[str]:
        """Every name that can be looked up now, sorted. Imports nothing."""
        ready = {row.name for row in index().of_group(self.group) if row.state == "ready"}
        return sorted(ready | set(self._local))

    def entries(self, name: str | None = None) -> list[Entry]:
        """Every name with where it comes from and its state, sorted; broken ones too.

        ``name``: that one alone, without a look at the others.
        """
        rows = index().of_group(self.group) if name is None else self._all_rows(name)
        found = [self._entry(row) for row in rows if not self._hides(row)]
        for each, local in sorted(self._local.items()):
            if name not in (None, each):
                continue
            row = next((r for r in self._rows(each) if same_class(r.value, local.path)), local.row)
            if row is None or row.group != self.group:
                where = (row.distribution, row.version) if row else (HERE, "")
                found.append(Entry(each, local.path, *where, "ready"))
        present = {entry.name for entry in found}
        for each, known in KNOWN.get(self.kind, {}).items():
            if each not in present and name in (None, each):
                line = pip_line(known.extra)
                found.append(Entry(each, "", known.distribution, "", "not installed", "", line))
        return sorted(found, key=lambda entry: (entry.name, entry.distribution))

    def missing(self, name: str) -> LoadkitError:
        """The error for a name that nobody has."""
        shown = printable(name, 100)
        unusable = self._rows(name, usable=False)
        notes = [f"'{shown}': {row.problem}" for row in unusable]
        notes += index().duplicates
        detail = {"asked": shown, "installed": self.names(), "notes": notes}
        known = KNOWN.get(self.kind, {}).get(name)
        told = f"; {'; '.join(notes)}" if notes else ""
        if known is not None:
            version = index().version_of(known.distribution)
            advice = pip_line(known.extra) if version is None else None
            lacks = "not installed" if version is None else f"installed as {version} and lacks it"
            if any(row.state == "disabled" for row in unusable):
                lacks, advice = "switched off", "change the environment variable"
            return NotInstalledError(
                f"{self.noun} '{shown}' comes with {known.distribution}, which is {lacks}{told}",
                detail={**detail, "distribution": known.distribution, "extra": known.extra},
                hint=advice,
            )
        near = nearest(name, {*self.names(), *KNOWN.get(self.kind, {})})
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        names = self.names()
        listed = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if names[20:] else "")
        failed = sorted({failure.row.origin for failure in failures()})
        told += f"; these plugins failed: {', '.join(failed)}" if failed else ""
        return UnknownNameError(
            f"no {self.noun} '{shown}'{hint}; installed: {listed or 'none'}{told}",
            detail={**detail, "nearest": near},
        )

    def exportable(self) -> dict[str, str]:
        """This process's registrations that another process can repeat: name -> module:Class."""
        found = {name: local.path for name, local in self._local.items()}
        return {name: path for name, path in found.items() if _travels(path)}

    def bound_here(self) -> list[str]:
        """Names that this process registered and no other process can be given."""
        found = [name for name, local in self._local.items() if not _travels(local.path)]
        return sorted(found)

    def forget_contests(self) -> None:
        """Forget which names hook plugins fought over."""
        self._contested.clear()

    # -- inside ----------------------------------------------------------------------------------

    def _find(self, name: str) -> Local | Row | None:
        """The one registration or row of a name, or None; imports nothing."""
        if name == "auto" and self.kind in ("loaders", "readers"):
            raise UsageError(f"'auto' is a decision of a load, not a {self.noun} by itself")
        installed = index()
        installed.check_allowed()
        local = self._local.get(name)
        every = installed.by_name.get((self.group, name), [])
        rows = [row for row in every if row.state == "ready"]
        if name in self._contested and not (local and local.override):
            raise self._conflict(name, self._contested[name])
        if local is not None:
            others = [row.origin for row in rows if not same_class(row.value, local.path)]
            if others and not local.override:
                raise self._conflict(name, [*others, local.origin])
            return local
        if len(rows) > 1:
            raise self._conflict(name, [row.origin for row in rows])
        if rows:
            return rows[0]
        broken = [row for row in every if row.state == "broken"]
        return broken[0] if broken else None

    def _claimed(self, name: str) -> bool:
        rows = self._all_rows(name)
        return name in self._local or any(row.state in ("ready", "broken") for row in rows)

    def _rows(self, name: str, *, usable: bool = True) -> list[Row]:
        return [row for row in self._all_rows(name) if (row.state == "ready") is usable]

    def _all_rows(self, name: str) -> list[Row]:
        return index().by_name.get((self.group, name), [])

    def _hides(self, row: Row) -> bool:
        """Whether an override of this process took a row's name."""
        local = self._local.get(row.name)
        return local is not None and local.override and not same_class(local.path, row.value)

    def _entry(self, row: Row) -> Entry:
        state, problem = row.state, row.problem
        if state == "ready":
            failed = next((each for each in failures() if each.row == row), None)
            if len(self._rows(row.name)) > 1:
                others = [each.origin for each in self._rows(row.name) if each != row]
                state, problem = "conflict", f"{', '.join(others)} claims the name too"
            elif row.name in self._contested:
                claims = " and by ".join(self._contested[row.name])
                state, problem = "conflict", f"it is claimed by {claims}"
            elif failed is not None:
                cause = f"{type(failed.error).__name__}: {printable(failed.error)}"
                state, problem = "broken", cause
            elif mismatched := mismatch(row):
                state, problem = "incompatible", mismatched
        return Entry(row.name, row.value, row.distribution, row.version, state, problem)

    def _conflict(self, name: str, origins: list[str]) -> ConflictError:
        return ConflictError(
            f"{self.noun} '{printable(name, 100)}' is claimed by {' and by '.join(origins)}",
            detail={"name": name, "claims": origins},
            hint="uninstall one, name one in LOADKIT_DISABLE_PLUGINS, or register with "
            "override=True",
        )

    def _contest(self, name: str, claims: list[str], plugin: Row) -> None:
        """A hook plugin claims a name that is taken: told once, and an error when asked for."""
        self._contested[name] = claims
        on_undo(lambda: self._contested.pop(name, None))
        row = replace(plugin, group=self.group, name=name, value=claims[-1])
        report(self._conflict(name, claims), row)

    def _restore(self, name: str, new: Local, old: Local | None) -> None:
        """Undo a registration, if it still stands."""
        with self._lock:
            if self._local.get(name) is new:
                del self._local[name]
                if old is not None:
                    self._local[name] = old

    def _check_registration(self, name: object, value: object) -> None:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise OptionError(f"{printable(repr(name), 80)} cannot be the name of a {self.noun}")
        if name == "auto" and self.kind in ("loaders", "readers"):
            raise OptionError(f"'auto' is a decision, never a {self.noun}")
        if isinstance(value, str):
            if not _PATH.fullmatch(value):
                raise OptionError(
                    f"{self.noun} {name!r} is registered as {printable(repr(value), 80)}; "
                    "accepted: a class, or 'module:Class'"
                )
        elif problem := self._unfit(value):
            raise OptionError(f"{self.noun} {name!r} is registered as {problem}")

    def _unfit(self, value: object) -> str | None:
        """Why an object cannot be a value of this table, or None."""
        if self.base is None:
            return None
        module, _, name = self.base.partition(":")
        base = getattr(sys.modules.get(module), name, None)
        if isinstance(value, type) and isinstance(base, type) and issubclass(value, base):
            return None
        return f"{printable(repr(value), 80)}, which is no subclass of {name}"

    def _checked(self, value: object, row: Row) -> object:
        problem = self._unfit(value)
        if problem:
            raise PluginError(f"{row.name!r} of {row.origin} cannot be used: it is {problem}")
        return value


def _travels(path: str) -> bool:
    """Whether another process can import what ``module:Class`` names."""
    return bool(_PATH.fullmatch(path)) and not path.startswith("__main__:") and "<" not in path
