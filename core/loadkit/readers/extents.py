"""The arithmetic of one extent, and raw memory as buffers: shared by the readers of this folder."""

from __future__ import annotations

import ctypes
from math import gcd

import torch

from loadkit.readers.base import Extent

__all__ = ["buffer_at", "check_extent", "copy_rows"]

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}

# torch copies fewer elements than this without waking its own thread pool. A pool for each of
# our threads would fight over the same cores.
_SERIAL_ELEMENTS = 32767

_memoryview_at = ctypes.pythonapi.PyMemoryView_FromMemory
_memoryview_at.restype = ctypes.py_object
_memoryview_at.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WRITABLE = 0x200  # PyBUF_WRITE


def buffer_at(address: int, nbytes: int) -> memoryview:
    """Memory as a writable buffer. It owns nothing: the caller keeps the memory alive."""
    view: memoryview = _memoryview_at(address, nbytes, _WRITABLE)
    return view


def check_extent(extent: Extent, *, devices: bool = False) -> None:
    """Refuse an extent that would write outside its destination or write a byte twice.

    Args:
        extent: the extent.
        devices: its memory may be an accelerator's.

    Raises:
        ValueError: the caller's arithmetic is wrong. Nothing was read.
    """
    dest, rows, row_bytes = extent.dest, extent.rows, extent.row_bytes
    here = dest.device.type == "cpu" or (devices and dest.device.type != "meta")
    if dest.dtype != torch.uint8 or not here or dest.dim() != 1:
        raise ValueError(
            f"{extent.tensor}: a destination is a 1-d uint8 CPU tensor, "
            f"not {dest.dim()}-d {dest.dtype} on {dest.device}"
        )
    if rows < 0 or row_bytes < 0 or extent.offset < 0:
        raise ValueError(f"{extent.tensor}: negative rows, row_bytes or offset")
    if not rows or not row_bytes:
        return
    if not dest.is_contiguous():
        raise ValueError(f"{extent.tensor}: the destination's bytes are not neighbours")
    if rows > 1 and (extent.dest_stride < row_bytes or extent.file_stride < 0):
        raise ValueError(
            f"{extent.tensor}: rows of {row_bytes} bytes overlap in memory (dest_stride "
            f"{extent.dest_stride}) or go backwards (file_stride {extent.file_stride})"
        )
    needed = (rows - 1) * extent.dest_stride + row_bytes
    if needed > dest.numel():
        raise ValueError(
            f"{extent.tensor}: the extent needs {needed} bytes of memory, "
            f"its destination has {dest.numel()}"
        )


def copy_rows(
    source: int, source_stride: int, dest: int, dest_stride: int, row_bytes: int, rows: int
) -> None:
    """Copy ``rows`` runs of ``row_bytes`` bytes between two addresses; strides in bytes.

    The caller keeps both sides alive. Small rows go through torch, a few thousand at a time;
    the interpreter lock is released while bytes move.
    """
    if row_bytes >= 64 << 10:
        for row in range(rows):
            ctypes.memmove(dest + row * dest_stride, source + row * source_stride, row_bytes)
        return
    word = gcd(8, row_bytes, source_stride, dest_stride, source, dest)
    width = row_bytes // word
    step = max(1, _SERIAL_ELEMENTS // width)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        into = _rows_at(dest + first * dest_stride, dest_stride, width, count, word)
        into.copy_(_rows_at(source + first * source_stride, source_stride, width, count, word))


def _rows_at(address: int, stride: int, width: int, rows: int, word: int) -> torch.Tensor:
    """Memory as a tensor [rows, width] of words; ``stride`` in bytes."""
    count = ((rows - 1) * stride) // word + width
    flat = torch.frombuffer(
        buffer_at(address, count * word), dtype=_WORDS[word], count=count, requires_grad=False
    )
    return flat.as_strided((rows, width), (stride // word, 1))
