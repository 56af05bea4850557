"""Who claims a name: an entry point, or a registration of this process."""

from __future__ import annotations

from dataclasses import dataclass

from loadkit.entry_index import Row

__all__ = ["HERE", "Entry", "Local", "same_class"]

HERE = "this process"


@dataclass(frozen=True, slots=True)
class Entry:
    """A row as it is listed. Nothing was imported to make it.

    ``state``: ready, broken, conflict, incompatible, disabled, stale, or not installed.
    ``value`` is ``module:Class``. ``install`` is the pip line where one is known.
    """

    name: str
    value: str
    distribution: str
    version: str
    state: str
    error: str = ""
    install: str = ""


@dataclass(frozen=True, slots=True)
class Local:
    """A registration made in this process; ``row`` is the plugin that made it, if one did."""

    value: object
    override: bool
    row: Row | None

    @property
    def path(self) -> str:
        """``module:Class`` of the value."""
        if isinstance(self.value, str):
            return self.value
        module = getattr(self.value, "__module__", "?")
        return f"{module}:{getattr(self.value, '__qualname__', type(self.value).__name__)}"

    @property
    def origin(self) -> str:
        """Where it comes from, for people."""
        where = self.row.distribution + " " + self.row.version if self.row else HERE
        return f"{where} ({self.path})"


def same_class(one: str, other: str) -> bool:
    """Whether two paths are one class: a package may re-export it from a module of its own."""
    (module, _, name), (module2, _, name2) = one.partition(":"), other.partition(":")
    same_module = module == module2
    same_package = module.split(".")[0] == module2.split(".")[0] != "__main__"
    return name == name2 and (same_module or same_package)
