"""The five tables of names: load formats, architectures, quantisation methods, sources, readers.

This module imports nothing that a name stands for, and no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from loadkit.claims import Entry
from loadkit.name_table import NameTable

__all__ = [
    "TABLES",
    "Entry",
    "NameTable",
    "bound_here",
    "export_registrations",
    "import_registrations",
    "loaders",
    "models",
    "quantization",
    "readers",
    "register_model_loader",
    "register_reader",
    "register_source",
    "sources",
]

Value = TypeVar("Value")


class _View(Mapping[str, Any]):
    """A table as a live, read-only mapping: listing imports nothing, indexing imports the hit."""

    def __init__(self, table: NameTable) -> None:
        self._table = table

    def __getitem__(self, name: str) -> Any:
        return self._table.lookup(name)

    def __contains__(self, name: object) -> bool:
        return name in self._table.names()

    def get(self, name: str, default: Any = None) -> Any:
        """The class of ``name``, or ``default`` where there is no such name."""
        return self._table.lookup(name) if name in self else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._table.names())

    def __len__(self) -> int:
        return len(self._table.names())


_BASES = {
    "loaders": "loadkit.base_loader:BaseModelLoader",
    "models": "torch.nn:Module",
    "quantization": "loadkit.quantization_base:QuantizationConfig",
    "sources": "loadkit.sources.base:Source",
    "readers": "loadkit.readers.base:Reader",
}
loaders = NameTable("loaders", "loadkit.loaders", "load format", _BASES["loaders"])
models = NameTable("models", "loadkit.models", "architecture", _BASES["models"])
quantization = NameTable(
    "quantization", "loadkit.quantization", "quantisation method", _BASES["quantization"]
)
sources = NameTable("sources", "loadkit.sources", "source scheme", _BASES["sources"])
readers = NameTable("readers", "loadkit.readers", "reader", _BASES["readers"])

TABLES = {each.kind: each for each in (loaders, models, quantization, sources, readers)}

_LOAD_FORMAT_TO_MODEL_LOADER: Mapping[str, Any] = _View(loaders)


def _decorator(table: NameTable, name: str, override: bool) -> Callable[[Value], Value]:
    def register(value: Value) -> Value:
        table.register(name, value, override=override)
        return value

    return register


def register_model_loader(name: str, *, override: bool = False) -> Callable[[Value], Value]:
    """Register the decorated ``BaseModelLoader`` for a load format."""
    return _decorator(loaders, name, override)


def register_source(scheme: str, *, override: bool = False) -> Callable[[Value], Value]:
    """Register the decorated ``Source`` for a URI scheme."""
    return _decorator(sources, scheme, override)


def register_reader(name: str, *, override: bool = False) -> Callable[[Value], Value]:
    """Register the decorated ``Reader``."""
    return _decorator(readers, name, override)


def export_registrations() -> dict[str, dict[str, str]]:
    """This process's registrations, for a process it starts: table -> name -> module:Class."""
    return {kind: found for kind, table in TABLES.items() if (found := table.exportable())}


def bound_here() -> list[str]:
    """Registrations of this process that none it starts can have, each with its table's noun."""
    return [f"{table.noun} {name!r}" for table in TABLES.values() for name in table.bound_here()]


def import_registrations(exported: Mapping[str, Mapping[str, str]]) -> None:
    """Repeat the registrations of another process."""
    for kind, registrations in exported.items():
        for name, path in registrations.items():
            TABLES[kind].register(name, path, override=True)
