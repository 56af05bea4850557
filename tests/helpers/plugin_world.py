"""A folder on sys.path with fake distributions, and tables as they were when a test ends."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers.checkpoints import fake_distribution
from loadkit import entry_index, plugins, tables

__all__ = ["World", "plugin_world"]


class World:
    """Fake distributions in ``folder``, which is on sys.path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def dist(
        self,
        name: str,
        entry_points: str,
        *,
        version: str = "1.0",
        suffix: str = "dist-info",
        requires: Iterable[str] = (),
        **modules: str,
    ) -> None:
        """A distribution, and the source text of its modules by name."""
        for module, text in modules.items():
            (self.folder / f"{module}.py").write_text(text)
        fake_distribution(
            self.folder, name, entry_points, version=version, suffix=suffix, requires=requires
        )
        entry_index.refresh()

    def imported(self, module: str) -> bool:
        """Whether a module of a fake distribution was imported."""
        return module in sys.modules


@contextmanager
def plugin_world(folder: Path) -> Iterator[World]:
    """A world whose registrations, failures and modules are gone afterwards."""
    modules = set(sys.modules)
    local = {table: dict(table._local) for table in tables.TABLES.values()}
    sys.path.insert(0, str(folder))
    plugins.reset()
    entry_index.refresh()
    try:
        yield World(folder)
    finally:
        sys.path.remove(str(folder))
        for table, before in local.items():
            table._local.clear()
            table._local.update(before)
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
                del sys.modules[name]
        plugins.reset()
        entry_index.refresh()
