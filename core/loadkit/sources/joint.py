"""A source with files of another folder among its own: weights that lie apart from their config."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from loadkit.sources.base import Source

if TYPE_CHECKING:
    from loadkit.sources.base import File, FileInfo

__all__ = ["JointSource"]


class JointSource(Source):
    """Some files of ``second`` go before those of ``first``; all others are first's.

    It closes both; the second one also when nobody holds it any more.

    Args:
        first: where everything else lies; its owner may close it too.
        second: where the weights lie; it becomes this one's own.
        takes: which of its files, by name, count.
    """

    def __init__(self, first: Source, second: Source, takes: Callable[[str], bool]) -> None:
        super().__init__(first.uri, first.load_config)
        self.first, self.second = first, second
        self.single: str | None = getattr(first, "single", None)
        self.load_options = first.load_options  # type: ignore[misc]  # what a load may ask for
        self.remarks = [*first.remarks, *second.remarks]
        self._names = {info.name for info in second.list() if takes(info.name)}
        self._end = weakref.finalize(self, second.close)

    @property
    def bytes_fetched(self) -> int:  # type: ignore[override]
        """Of both."""
        return self.first.bytes_fetched + self.second.bytes_fetched

    def list(self) -> Sequence[FileInfo]:
        kept = [info for info in self.first.list() if info.name not in self._names]
        taken = [info for info in self.second.list() if info.name in self._names]
        return sorted([*kept, *taken], key=lambda info: info.name)

    def open(self, name: str) -> File:
        return (self.second if name in self._names else self.first).open(name)

    def opened(self) -> Sequence[File]:
        return [*self.first.opened(), *self.second.opened()]

    def make_local(self, names: Sequence[str]) -> None:
        self.first.make_local([name for name in names if name not in self._names])
        self.second.make_local([name for name in names if name in self._names])

    def close(self) -> None:
        self._end()
        self.first.close()
