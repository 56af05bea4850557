"""What the choice of a reader looks at outside of the load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadkit.available_memory import available_memory
from loadkit.readers.direct import takes_direct
from loadkit.readers.file_systems import kind_of
from loadkit.readers.page_cache import cached_share

if TYPE_CHECKING:
    from loadkit.sources.base import File

__all__ = ["Surroundings"]


@dataclass(frozen=True)
class Surroundings:
    """The machine as a decision sees it; another one can be given.

    Attributes:
        kind: the type of the file system that holds a file, empty where unknown.
        cached: which part of the files is in the page cache, None where unknown.
        memory: bytes that can still be taken, None where unknown.
        direct: whether a file can be read past the page cache.
    """

    kind: Callable[[File], str] = kind_of
    cached: Callable[[Sequence[File]], float | None] = cached_share
    memory: Callable[[], int | None] = available_memory
    direct: Callable[[File], bool] = takes_direct
