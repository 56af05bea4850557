"""Rows that are copied from one place of memory to another."""

from __future__ import annotations

import errno
from itertools import product

import pytest
import torch

from loadkit.readers import extents
from loadkit.readers.extents import copy_rows
from loadkit.readers.pages import PAGE, populate, reserve

ROWS = [(2, 9000), (6, 5000), (17, 700), (1000, 70), (4096, 200), (8192, 130), (70_001, 9)]


@pytest.mark.parametrize(("row_bytes", "rows"), ROWS)
@pytest.mark.parametrize("phases", list(product((0, 1, 8), (0, 3, 4095))))
def test_every_byte_of_every_row_comes_and_no_byte_between_rows_is_touched(
    row_bytes: int, rows: int, phases: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(row_bytes)
    for from_gap, to_gap in ((0, 0), (row_bytes, 0), (5, 3), (PAGE + 1, 0), (0, PAGE + 2)):
        source_stride, dest_stride = row_bytes + from_gap, row_bytes + to_gap
        source = torch.randint(
            0, 256, (phases[0] + rows * source_stride,), dtype=torch.uint8, generator=generator
        )
        dest = reserve(rows * dest_stride, phases[1])
        copy_rows(
            source.data_ptr() + phases[0],
            source_stride,
            dest.data_ptr(),
            dest_stride,
            row_bytes,
            rows,
        )
        wanted = torch.zeros(rows, dest_stride, dtype=torch.uint8)
        wanted[:, :row_bytes] = source[phases[0] :].view(rows, source_stride)[:, :row_bytes]
        assert torch.equal(dest.view(rows, dest_stride), wanted)


@pytest.mark.parametrize(("row_bytes", "rows"), ROWS)
def test_memory_is_asked_for_where_rows_come_and_a_refusal_does_no_harm(
    row_bytes: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    def refusing(address: int, nbytes: int, *, for_writing: bool) -> int:
        assert for_writing
        asked.append((address, nbytes))
        return errno.ENOMEM

    monkeypatch.setattr(extents, "populate", refusing)
    source = torch.ones(rows * row_bytes, dtype=torch.uint8)
    dest = reserve(rows * row_bytes, 0)
    copy_rows(source.data_ptr(), row_bytes, dest.data_ptr(), row_bytes, row_bytes, rows)
    assert bool((dest == 1).all())
    at = dest.data_ptr()
    for address, nbytes in asked:
        assert address == at  # one after the other, none twice
        at += nbytes
    assert dest.nbytes - (at - dest.data_ptr()) < PAGE  # a last piece may be too small to ask


def test_pages_between_rows_stay_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def noting(address: int, nbytes: int, *, for_writing: bool) -> int:
        asked.append(nbytes)
        return populate(address, nbytes, for_writing=for_writing)

    monkeypatch.setattr(extents, "populate", noting)
    source, dest = torch.ones(64 * PAGE, dtype=torch.uint8), reserve(64 * 3 * PAGE, 0)
    copy_rows(source.data_ptr(), PAGE, dest.data_ptr(), 3 * PAGE, PAGE, 64)
    assert asked == []
    assert int(dest.sum(dtype=torch.int64)) == 64 * PAGE
