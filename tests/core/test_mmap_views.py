"""Views of a mapping: they live as long as they are used and hold their own bytes only."""

from __future__ import annotations

import gc
import io
import os
from pathlib import Path

import pytest
import torch

from helpers.extents import (
    SIZE,
    content,
)
from loadkit.config import LoadConfig
from loadkit.errors import ChangedError, TruncatedError
from loadkit.readers.mmap import MmapReader
from loadkit.readers.pread import PreadReader
from loadkit.sources.local_file import LocalFile


def test_a_view_outlives_its_reader_its_file_and_the_files_name(tmp_path: Path) -> None:
    gone = tmp_path / "gone.bin"
    gone.write_bytes(data := content(100_000))
    before = mapped_lines(gone)
    opened = LocalFile("gone.bin", str(gone))
    reader = MmapReader(LoadConfig())
    first, second = reader.view(opened, 5000, 70_000), reader.view(opened, 75_000, 25_000)
    assert bytes(first.numpy()) == data[5000:75_000]
    reader.close()
    opened.close()
    gone.unlink()
    del reader, first
    gc.collect()
    assert bytes(second.numpy()) == data[75_000:]
    assert mapped_lines(gone) == before + 1
    del second
    gc.collect()
    assert mapped_lines(gone) == before


def mapped_lines(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(path))


def test_saving_a_view_saves_only_its_bytes(file: LocalFile) -> None:
    view = MmapReader(LoadConfig()).view(file, 64, 4000)
    assert view.untyped_storage().nbytes() == 4000
    assert view.storage_offset() == 0
    out = io.BytesIO()
    torch.save(view.view(torch.bfloat16), out)
    assert out.tell() < 4000 + 2000


def test_writing_to_a_view_changes_neither_the_file_nor_another_view_of_its_neighbours(
    tmp_path: Path,
) -> None:
    kept = tmp_path / "kept.bin"
    kept.write_bytes(data := content(10_000))
    opened = LocalFile("kept.bin", str(kept))
    reader = MmapReader(LoadConfig())
    view, neighbour = reader.view(opened, 1000, 500), reader.view(opened, 1500, 500)
    view.zero_()
    assert bytes(view.numpy()) == bytes(500)
    assert bytes(neighbour.numpy()) == data[1500:2000]
    assert kept.read_bytes() == data
    opened.close()


def test_a_view_of_nothing_is_empty_even_of_an_empty_file(tmp_path: Path, file: LocalFile) -> None:
    (tmp_path / "empty.bin").write_bytes(b"")
    opened = LocalFile("empty.bin", str(tmp_path / "empty.bin"))
    reader = MmapReader(LoadConfig())
    assert reader.view(opened, 0, 0).shape == reader.view(file, SIZE, 0).shape == (0,)
    with pytest.raises(TruncatedError):
        reader.view(opened, 0, 1)
    opened.close()


@pytest.mark.parametrize(("offset", "nbytes"), [(0, SIZE + 1), (SIZE, 1), (SIZE + 1, 0)])
def test_a_view_past_the_end_is_refused(file: LocalFile, offset: int, nbytes: int) -> None:
    with pytest.raises(TruncatedError):
        MmapReader(LoadConfig()).view(file, offset, nbytes)


def test_a_view_of_a_file_that_was_cut_or_grown_is_refused(tmp_path: Path) -> None:
    changed = tmp_path / "changed.bin"
    changed.write_bytes(content(10_000))
    opened = LocalFile("changed.bin", str(changed))
    reader = MmapReader(LoadConfig())
    reader.view(opened, 0, 10_000)
    os.truncate(changed, 9_999)
    with pytest.raises(TruncatedError):
        reader.view(opened, 0, 10_000)
    os.truncate(changed, 20_000)
    with pytest.raises(ChangedError):
        reader.view(opened, 0, 20_000)
    opened.close()


def test_a_reader_without_aliases_says_so(file: LocalFile) -> None:
    assert not PreadReader.aliases
    with pytest.raises(NotImplementedError, match="cannot alias"):
        PreadReader(LoadConfig()).view(file, 0, 1)
