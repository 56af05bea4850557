"""The arithmetic of one extent, and raw memory as buffers: shared by the readers of this folder."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from loadkit.readers.base import Extent
from loadkit.readers.pages import PAGE, populate

__all__ = ["buffer_at", "check_extent", "copy_rows"]

_LONG_ROW = 64 << 10  # bytes from which on a row is a copy of its own
_NEAR = 512 << 10  # bytes that the processor still holds when it comes back to them

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

    The caller keeps both sides alive. The interpreter lock is released while bytes move. Memory
    that nobody has written to yet is asked for a piece at a time: a page fault for each page, from
    within the copy, takes half as long again.
    """
    step = 1 if row_bytes >= _LONG_ROW else max(1, _NEAR // dest_stride)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        into, from_ = dest + first * dest_stride, source + first * source_stride
        span = (count - 1) * dest_stride + row_bytes
        if span >= PAGE and dest_stride - row_bytes < PAGE:
            populate(into, span, for_writing=True)  # where it cannot, the copy itself finds out
        if count == 1:
            ctypes.memmove(into, from_, row_bytes)
        else:
            rows_in = _rows_at(into, dest_stride, row_bytes, count)
            np.copyto(rows_in, _rows_at(from_, source_stride, row_bytes, count))


def _rows_at(address: int, stride: int, row_bytes: int, rows: int) -> np.ndarray[Any, Any]:
    """Memory as an array [rows] of items without a type; ``stride`` in bytes."""
    buffer = buffer_at(address, (rows - 1) * stride + row_bytes)
    return np.ndarray((rows,), f"V{row_bytes}", buffer, strides=(stride,))
