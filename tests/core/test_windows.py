"""The part of an extent in a window, held against the slow way."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from helpers.extents import content, expected, extent, held
from loadkit.readers.windows import cut, meeting, merged, place_of, scatter, spans
from loadkit.sources.local_file import LocalFile

SIZE = 4096


def test_windows_together_give_an_extent_its_bytes(tmp_path: Path) -> None:
    data = content(SIZE)
    (tmp_path / "w").write_bytes(data)
    file = LocalFile("w", str(tmp_path / "w"))
    draw = random.Random(7)
    for _ in range(400):
        row_bytes, rows = draw.randint(1, 40), draw.randint(1, 12)
        stride = draw.choice([row_bytes, row_bytes + draw.randint(1, 90), row_bytes // 2, 0])
        offset = draw.randint(0, 1000)
        dest_stride = row_bytes + draw.randint(0, 9)
        wanted = extent(file, offset, row_bytes, rows, stride, dest_stride)
        end = offset + (rows - 1) * stride + row_bytes
        borders = sorted({0, *(draw.randint(0, end) for _ in range(draw.randint(0, 5))), end})
        windows = list(zip(borders, borders[1:], strict=False))
        for start, stop, inside in meeting([wanted], windows):
            buffer = torch.frombuffer(bytearray(data[start:stop]), dtype=torch.uint8)
            scatter(buffer.data_ptr(), start, stop, inside)
        assert held(wanted) == expected(data, wanted)
        parts = [place_of(wanted, part) for w in windows for part in cut(wanted, *w)]
        assert sum(p.rows * p.row_bytes for p in parts) == rows * row_bytes
        whole = merged(spans(wanted, 1 << 20))
        assert whole == [(offset, end)]
    file.close()


def test_rows_far_apart_are_spans_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(content(SIZE))
    file = LocalFile("w", str(tmp_path / "w"))
    assert list(spans(extent(file, 10, 4, 3, 100, 4), 96)) == [(10, 14), (110, 114), (210, 214)]
    assert list(spans(extent(file, 10, 4, 3, 100, 4), 97)) == [(10, 214)]
    assert list(spans(extent(file, 10, 0, 3, 100, 4), 96)) == []
    file.close()


def test_ranges_that_touch_become_one() -> None:
    assert merged([(5, 7), (0, 2), (2, 3), (6, 9), (9, 9)]) == [(0, 3), (5, 9)]
