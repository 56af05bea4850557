"""Which part of a file is in the page cache: asked of the kernel, at a few places of the file.

Source: ``cachestat(2)`` (Linux 6.5) and ``mincore(2)``.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loadkit.sources.base import File

__all__ = ["WARM", "cached_share"]

WARM = 0.9  # a file of which more than this is in the page cache counts as cached
SAMPLES = 16  # places of a file that are asked for
SAMPLE = 256 << 10  # bytes of each
_CACHESTAT = 451  # the same on every architecture but alpha
_PAGE = mmap.PAGESIZE

# Pages of a range of an open file that are cached; None where the kernel does not tell.
Ask = Callable[[int, int, int], int | None]


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("nbytes", ctypes.c_uint64))


class _Stat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cache", "dirty", "writeback", "evicted", "recently")
    )


def cached_share(files: Sequence[File], asks: Sequence[Ask] | None = None) -> float | None:
    """What part of these files is in the page cache, from 0 to 1; None where nobody can tell.

    Args:
        files: open local files.
        asks: how to ask the kernel, the best first.
    """
    asks = _ASKS if asks is None else asks
    cached = looked_at = 0
    for file in files:
        for offset, nbytes in _samples(file.size):
            pages = _ask(file.fileno(), offset, nbytes, asks)
            if pages is None:
                return None
            cached += pages
            looked_at += -(-nbytes // _PAGE)
    return cached / looked_at if looked_at else None


def _ask(descriptor: int, offset: int, nbytes: int, asks: Sequence[Ask]) -> int | None:
    for ask in asks:
        pages = ask(descriptor, offset, nbytes)
        if pages is not None:
            return pages
    return None


def _samples(size: int) -> Iterator[tuple[int, int]]:
    """Ranges spread over a file: all of it, where it is small."""
    if size <= SAMPLES * SAMPLE:
        if size:
            yield 0, size
        return
    step = (size - SAMPLE) / (SAMPLES - 1)
    for at in range(SAMPLES):
        yield int(at * step) // _PAGE * _PAGE, SAMPLE


_libc = ctypes.CDLL(None, use_errno=True)


def _by_cachestat(descriptor: int, offset: int, nbytes: int) -> int | None:
    if sys.platform != "linux" or platform.machine() == "alpha":
        return None
    asked, stat = _Range(offset, nbytes), _Stat()
    failed = _libc.syscall(
        ctypes.c_long(_CACHESTAT),
        ctypes.c_uint(descriptor),
        ctypes.byref(asked),
        ctypes.byref(stat),
        ctypes.c_uint(0),
    )
    return None if failed else int(stat.cache)


def _by_mincore(descriptor: int, offset: int, nbytes: int) -> int | None:
    """Tells the truth to the file's owner only; to others it calls every page cached."""
    owner = os.fstat(descriptor).st_uid
    if sys.platform != "linux" or os.geteuid() not in (owner, 0):
        return None
    start = offset // _PAGE * _PAGE
    length = offset + nbytes - start
    flags = mmap.MAP_PRIVATE  # and writable, which ctypes asks for to give an address
    try:
        with mmap.mmap(descriptor, length, flags=flags, offset=start) as memory:
            pages = (ctypes.c_ubyte * (-(-length // _PAGE)))()
            place = ctypes.c_char.from_buffer(memory)
            failed = _libc.mincore(
                ctypes.c_void_p(ctypes.addressof(place)), ctypes.c_size_t(length), pages
            )
            del place
    except (OSError, ValueError):
        return None
    return None if failed else sum(page & 1 for page in pages)


_ASKS: tuple[Ask, ...] = (_by_cachestat, _by_mincore)
