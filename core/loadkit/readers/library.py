"""The readers that have a library move the bytes: what they share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from loadkit.errors import NotInstalledError, PluginError
from loadkit.known_names import pip_line
from loadkit.options import validate_options
from loadkit.readers import ranges
from loadkit.readers.base import Extent, Place, Reader, Survey
from loadkit.readers.extents import check_extent
from loadkit.readers.ranges import Range
from loadkit.text import printable

if TYPE_CHECKING:
    from loadkit.config import LoadConfig

__all__ = ["BUFFER", "LibraryReader", "library"]

BUFFER = 16 << 20  # bytes that rows with gaps go through


def library(module: str, *, package: str, extra: str) -> Any:
    """A library's module, imported now.

    Args:
        module: its dotted name.
        package: the package as pip knows it.
        extra: the umbrella's extra that pulls it.

    Raises:
        NotInstalledError: it is not there; says the pip line.
        PluginError: it is, and cannot be imported.
    """
    if find_spec(module.partition(".")[0]) is None:
        raise NotInstalledError(
            f"the package {package} is not installed",
            detail={"package": package, "extra": extra},
            hint=pip_line(extra),
        )
    try:
        return import_module(module)
    except Exception as error:
        raise PluginError(
            f"{package} is installed and cannot be imported: {type(error).__name__}: "
            f"{printable(error)}",
            detail={"package": package},
        ) from error


class LibraryReader(Reader):
    """Puts ranges to a library (see ``ranges``). Subclasses say how in ``fetch``.

    Keeps one buffer of ``buffer`` bytes from the first rows with gaps until ``close``.
    """

    def __init__(self, load_config: LoadConfig, buffer: int = BUFFER) -> None:
        super().__init__(load_config)
        self._size = max(buffer, ranges.SPAN)
        self._buffer: torch.Tensor | None = None

    @classmethod
    def options_of(cls, load_config: LoadConfig) -> Mapping[str, Any]:
        """Every option of this reader: as given, where it is the one that was named.

        Raises:
            OptionError: one that it does not have, or a value that it does not take.
        """
        given = load_config.reader_options if load_config.reader == cls.name else {}
        return validate_options(cls.options, given, f"reader {cls.name!r}")

    def buffer_bytes(self) -> int:
        return self._size

    def survey(self, places: Iterable[Place]) -> Survey:
        return ranges.survey(places)

    def read(self, extents: Sequence[Extent], landed: Callable[[int], None] | None = None) -> int:
        """Fill every destination; ``landed`` gets counts that sum up to the result.

        Raises:
            ValueError: an extent does not fit its destination; nothing was read.
            TruncatedError: a file ended early.
            ReadError: the operating system or the library failed.
        """
        for extent in extents:
            check_extent(extent, devices=self.onto_device)
        total = 0
        for batch in ranges.batches(extents, self._memory):
            self.fetch(batch.ranges, landed or _nothing)
            batch.settle()
            total += sum(item.nbytes for item in batch.ranges)
        return total

    @abstractmethod
    def fetch(self, wanted: Sequence[Range], landed: Callable[[int], None]) -> None:
        """Fill the addresses of all ranges, and tell ``landed`` each one's bytes.

        When it returns or raises, nothing writes to any of the addresses any more.

        Raises:
            LoadkitError: a range cannot be read.
        """

    def close(self) -> None:
        self._buffer = None

    def _memory(self) -> torch.Tensor:
        if self._buffer is None:
            self._buffer = torch.empty(self._size, dtype=torch.uint8, device="cpu")
        return self._buffer


def _nothing(_: int) -> None:
    pass
