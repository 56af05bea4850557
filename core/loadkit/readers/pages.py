"""Memory that is made of pages: its own, and here and there the pages of files.

A page of a file can stand at any page of memory, so a tensor that is put together from several
places of files needs no copy of them, as long as each place lies in its page as the tensor's bytes
do in theirs. Only the pages at which two places meet are memory of its own.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch

__all__ = ["PAGE", "can_put_pages", "put_pages", "reserve"]

PAGE = mmap.PAGESIZE
_NO_RESERVE = 0x4000  # MAP_NORESERVE
_FIXED = 0x10  # MAP_FIXED: in place of what is there

_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_long,  # off_t where it is used: 64-bit Linux
)


def can_put_pages() -> bool:
    """Whether this system is one whose calls are known here: 64-bit Linux."""
    return sys.platform == "linux" and sys.maxsize > 2**32


def reserve(nbytes: int, phase: int) -> torch.Tensor:
    """Zeros, uint8 [nbytes], whose first byte is the ``phase``-th of a page.

    Memory is used only where it is written to. All of it, and every page of a file that was put
    into it, is given back with the last tensor of it.

    Raises:
        MemoryError, OSError: there is no room for it.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    memory = mmap.mmap(-1, phase + nbytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return torch.frombuffer(memory, dtype=torch.uint8, offset=phase, count=nbytes)


def put_pages(into: torch.Tensor, number: int, offset: int) -> int:
    """Have a part of reserved memory be a file's bytes, privately: writes do not reach the file.

    Args:
        into: uint8, of ``reserve``; begins and ends with a page.
        number: the file's descriptor.
        offset: of its first byte in the file; a multiple of ``PAGE``.

    Returns:
        0, or the errno of a refusal; the memory is as it was then.
    """
    flags = mmap.MAP_PRIVATE | _NO_RESERVE | _FIXED
    prot = mmap.PROT_READ | mmap.PROT_WRITE
    found = _mmap(into.data_ptr(), into.numel(), prot, flags, number, offset)
    return ctypes.get_errno() if found == ctypes.c_void_p(-1).value else 0
