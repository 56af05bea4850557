"""What a reader wants to know of its files, asked once each, and what it tells the kernel of them.

Nothing here changes which bytes are read, or how they are counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from loadkit.readers.file_systems import is_local
from loadkit.readers.page_cache import WARM, cached_share

if TYPE_CHECKING:
    from loadkit.readers.base import Extent
    from loadkit.sources.base import File

__all__ = ["FileStates", "announce", "will_need"]

_SCATTERED = 0.9  # reads that want less than this of the range they span want no read-ahead
_DEFAULT_READ_AHEAD = 128 << 10


class FileStates:
    """Remembers of each open file whether it is local, and whether it was cold when first asked.

    Args:
        local: whether page faults in a file are served by this kernel alone.
        share: what part of some files is in the page cache; None where nobody can tell.
    """

    def __init__(
        self,
        local: Callable[[File], bool] | None = None,
        share: Callable[[Sequence[File]], float | None] = cached_share,
    ) -> None:
        self._ask_local = is_local if local is None else local
        self._ask_share = share
        self._local: dict[int, bool] = {}
        self._cold: dict[int, bool] = {}

    def is_local(self, file: File) -> bool:
        """Whether page faults in it block on nothing but a local disk."""
        if id(file) not in self._local:
            self._local[id(file)] = self._ask_local(file)
        return self._local[id(file)]

    def is_cold(self, file: File) -> bool:
        """Whether it is a local file of which little was in the page cache at the first question.

        False where nobody can tell.
        """
        if id(file) not in self._cold:
            share = self._ask_share([file]) if self.is_local(file) else None
            self._cold[id(file)] = share is not None and share < WARM
        return self._cold[id(file)]


def announce(extents: Iterable[Extent], states: FileStates) -> None:
    """Tell the kernel how the extents of one ``read`` want their cold files read.

    Where gaps are left out there is no read-ahead: what follows belongs to another rank.
    """
    wanted: dict[int, int] = {}
    spanned: dict[int, tuple[File, int, int]] = {}
    for extent in extents:
        file, end = extent.file, extent.offset + (extent.rows - 1) * extent.file_stride
        end += extent.row_bytes
        wanted[id(file)] = wanted.get(id(file), 0) + extent.rows * extent.row_bytes
        _, low, high = spanned.get(id(file), (file, extent.offset, end))
        spanned[id(file)] = file, min(low, extent.offset), max(high, end)
    if _has_no_advice():
        return
    for key, (file, low, high) in spanned.items():
        if states.is_cold(file):
            scattered = wanted[key] < _SCATTERED * (high - low)
            advice = os.POSIX_FADV_RANDOM if scattered else os.POSIX_FADV_NORMAL
            with suppress(OSError):
                os.posix_fadvise(file.fileno(), 0, 0, advice)


def will_need(file: File, offset: int, nbytes: int) -> None:
    """Have the kernel begin to read exactly these bytes into the page cache."""
    if _has_no_advice():
        return
    number = file.fileno()
    step = _read_ahead(os.fstat(number).st_dev)  # more is cut off by the kernel
    with suppress(OSError):
        for start in range(offset, offset + nbytes, step):
            length = min(step, offset + nbytes - start)
            os.posix_fadvise(number, start, length, os.POSIX_FADV_WILLNEED)


def _has_no_advice() -> bool:
    """Whether this system has no ``posix_fadvise`` (macOS)."""
    return not hasattr(os, "posix_fadvise")


@cache
def _read_ahead(device: int) -> int:
    """Bytes that a device's file system reads ahead at most."""
    name = f"{os.major(device)}:{os.minor(device)}"
    try:
        kib = int(Path(f"/sys/class/bdi/{name}/read_ahead_kb").read_text())
    except (OSError, ValueError):
        return _DEFAULT_READ_AHEAD
    return max(_DEFAULT_READ_AHEAD, kib << 10)
