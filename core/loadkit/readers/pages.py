"""Memory that is made of pages: its own, and here and there the pages of files.

A page of a file can stand at any page of memory, so a tensor that is put together from several
places of files needs no copy of them, as long as each place lies in its page as the tensor's bytes
do in theirs. Only the pages at which two places meet are memory of its own.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import sys
import weakref
from itertools import count

import torch

__all__ = [
    "PAGE",
    "can_put_pages",
    "madvise",
    "populate",
    "put_pages",
    "reserve",
    "runs_held",
]

PAGE = mmap.PAGESIZE
_NO_RESERVE = 0x4000  # MAP_NORESERVE
_FIXED = 0x10  # MAP_FIXED: in place of what is there
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # MADV_POPULATE_*, Linux 5.14
_IF_FREE = 0x100000  # MAP_FIXED_NOREPLACE, Linux 4.17; a hint before that

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_long,  # off_t where it is used: 64-bit Linux
)
_FAILED = ctypes.c_void_p(-1).value  # MAP_FAILED
_munmap = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
madvise = _libc.madvise
madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_held: dict[int, int] = {}  # runs of each memory that lives
_numbers = count()


def can_put_pages() -> bool:
    """Whether this system is one whose calls are known here: 64-bit Linux."""
    return sys.platform == "linux" and sys.maxsize > 2**32


def reserve(nbytes: int, phase: int, runs: int = 0) -> torch.Tensor:
    """Zeros, uint8 [nbytes], whose first byte is the ``phase``-th of a page.

    Memory is used only where it is written to. All of it, and every page of a file that was put
    into it, is given back with the last tensor of it; until then ``runs_held`` counts ``runs``.

    Raises:
        MemoryError, OSError: there is no room for it.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    memory = mmap.mmap(-1, phase + nbytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    if runs:
        number = next(_numbers)
        _held[number] = runs
        weakref.finalize(memory, _held.pop, number, None).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8, offset=phase, count=nbytes)


def runs_held() -> int:
    """How many runs of files' pages the memory that lives was reserved for."""
    return sum(tuple(_held.values()))


def populate(address: int, nbytes: int, *, for_writing: bool = False) -> int:
    """Fault in the pages of these bytes.

    Returns:
        An errno, or 0: done, or this kernel has no call for it.
    """
    if sys.platform != "linux":
        return 0
    start = address // PAGE * PAGE
    advice = _POPULATE_WRITE if for_writing else _POPULATE_READ
    while True:
        refused = madvise(start, address + nbytes - start, advice)
        number = ctypes.get_errno() if refused else 0
        if number == errno.EINVAL:
            return 0
        if number not in (errno.EINTR, errno.EAGAIN):
            return number


def put_pages(into: torch.Tensor, number: int, offset: int) -> int:
    """Have a part of reserved memory be a file's bytes, privately: writes do not reach the file.

    Args:
        into: uint8, of ``reserve``; begins and ends with a page.
        number: the file's descriptor.
        offset: of its first byte in the file; a multiple of ``PAGE``.

    Returns:
        0, or the errno of a refusal; the memory is there then, as it was or as zeros.

    Raises:
        MemoryError: it is not there any more, and cannot be had again.
    """
    address, nbytes = into.data_ptr(), into.numel()
    flags = mmap.MAP_PRIVATE | _NO_RESERVE
    prot = mmap.PROT_READ | mmap.PROT_WRITE
    if _mmap(address, nbytes, prot, flags | _FIXED, number, offset) != _FAILED:
        return 0
    refusal = ctypes.get_errno()
    _restore(address, nbytes, prot, flags | mmap.MAP_ANONYMOUS | _IF_FREE)
    return refusal


def _restore(address: int, nbytes: int, prot: int, flags: int) -> None:
    """Linux takes away what was there before some refusals: have memory there again."""
    found = _mmap(address, nbytes, prot, flags, -1, 0)
    if found == _FAILED:
        there = ctypes.get_errno() == errno.EEXIST
        if not there and madvise(address, nbytes, 0) and ctypes.get_errno() == errno.ENOMEM:
            raise MemoryError(f"no memory for {nbytes} bytes")
    elif found != address:
        _munmap(found, nbytes)  # an older kernel, and something is there
