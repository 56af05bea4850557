"""Extents over a file of known bytes, and what a reader must have made of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from loadkit.readers import direct, eager, mmap, pread, rows, runs
from loadkit.readers.base import Extent, Place, Reader, Survey
from loadkit.readers.direct import DirectReader
from loadkit.readers.eager import EagerReader
from loadkit.readers.mmap import MmapReader
from loadkit.readers.pread import PreadReader
from loadkit.readers.rows import GAP
from loadkit.readers.runs import LONG_ROW
from loadkit.sources.local_file import LocalFile

READERS: list[type[Reader]] = [PreadReader, MmapReader, DirectReader]
BY_CALLS: list[type[Reader]] = [*READERS, EagerReader]
SIZE = 3 << 20


def content(nbytes: int, seed: int = 0) -> bytes:
    """Bytes that do not repeat within any stride a test uses."""
    generator = torch.Generator().manual_seed(seed)
    return bytes(torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).numpy())


def extent(
    file: LocalFile,
    offset: int,
    row_bytes: int,
    rows: int = 1,
    file_stride: int | None = None,
    dest_stride: int | None = None,
    tensor: str = "t",
) -> Extent:
    """An extent into fresh memory that is 0xAA wherever nothing lands."""
    dest_stride = row_bytes if dest_stride is None else dest_stride
    dest = torch.full((max(0, rows - 1) * dest_stride + row_bytes,), 0xAA, dtype=torch.uint8)
    stride = row_bytes if file_stride is None else file_stride
    return Extent(file, offset, row_bytes, rows, stride, dest, dest_stride, tensor)


def expected(data: bytes, wanted: Extent) -> bytes:
    """What the destination must hold, written the slow way."""
    dest = bytearray(b"\xaa" * wanted.dest.numel())
    for row in range(wanted.rows):
        start = wanted.offset + row * wanted.file_stride
        at = row * wanted.dest_stride
        dest[at : at + wanted.row_bytes] = data[start : start + wanted.row_bytes]
    return bytes(dest)


def held(wanted: Extent) -> bytes:
    return bytes(wanted.dest.numpy())


def surveyed(reader: Reader, extents: Sequence[Extent]) -> Survey:
    """What the reader says that reading the extents would take."""
    return reader.survey(
        [Place(e.file, e.offset, e.row_bytes, e.rows, e.file_stride, e.tensor) for e in extents]
    )


def check(reader: Reader, extents: Sequence[Extent], data: bytes) -> None:
    landed: list[int] = []
    foretold = surveyed(reader, extents).nbytes
    total = reader.read(extents, landed.append)
    assert [held(e) == expected(data, e) for e in extents] == [True] * len(extents)
    assert total == foretold == sum(landed)


def open_descriptors() -> list[str]:
    return sorted(p.name for p in Path("/proc/self/fd").iterdir())


def reader_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "loadkit-reader"]


def mixed_extents(file: LocalFile) -> list[Extent]:
    """One of each way an extent can be read."""
    return [
        extent(file, 0, 1000, tensor="first"),
        extent(file, 1000, 3000, tensor="touching"),
        extent(file, 8000, 64, 50, 128, 64, tensor="staged"),
        extent(file, 20_000, LONG_ROW, 20, LONG_ROW + 100, LONG_ROW, tensor="vector"),
        extent(file, 200_000, 64, 10, GAP + 99, 80, tensor="alone"),
        extent(file, 400_000, 300_000, 2, 320_000, 300_000, tensor="huge"),
    ]


def small_pieces(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Cut the work into pieces of this size, so that little work needs many threads."""
    for module in (runs, rows, pread, mmap):
        monkeypatch.setattr(module, "PIECE", nbytes)
    for module in (direct, eager):
        monkeypatch.setattr(module, "WINDOW", -(-nbytes // direct.BLOCK) * direct.BLOCK)
