"""What is in the page cache is asked at a few places, by whatever the kernel offers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.cold import evict
from helpers.extents import content
from loadkit.readers import page_cache
from loadkit.readers.file_states import FileStates
from loadkit.readers.page_cache import SAMPLE, SAMPLES, cached_share
from loadkit.sources.local_file import LocalFile

SIZE = 8 << 20


@pytest.fixture
def file(tmp_path: Path) -> Iterator[LocalFile]:
    path = tmp_path / "weights.bin"
    path.write_bytes(content(1 << 20) * (SIZE >> 20))
    opened = LocalFile("weights.bin", str(path))
    yield opened
    opened.close()


def test_a_large_file_is_asked_for_at_a_few_places_over_all_of_it(file: LocalFile) -> None:
    asked: list[tuple[int, int]] = []

    def half(descriptor: int, offset: int, nbytes: int) -> int:
        asked.append((offset, nbytes))
        return nbytes // 4096 // 2

    assert cached_share([file], [half]) == 0.5
    assert len(asked) == SAMPLES and {nbytes for _, nbytes in asked} == {SAMPLE}
    assert asked[0][0] == 0 and SIZE - SAMPLE - 4096 < asked[-1][0] <= SIZE - SAMPLE
    assert all(offset % 4096 == 0 for offset, _ in asked)


def test_a_small_file_is_asked_for_whole(tmp_path: Path) -> None:
    (tmp_path / "small.bin").write_bytes(bytes(5000))
    opened = LocalFile("small.bin", str(tmp_path / "small.bin"))
    assert cached_share([opened], [lambda *asked: 1 if asked[1:] == (0, 5000) else 9]) == 0.5
    opened.close()


def test_the_next_way_is_asked_where_one_cannot_tell(file: LocalFile) -> None:
    assert cached_share([file], [lambda *_: None, lambda fd, offset, nbytes: 0]) == 0.0
    assert cached_share([file], [lambda *_: None]) is None
    assert cached_share([], [lambda *_: 1]) is None


@pytest.mark.parametrize("ask", page_cache._ASKS, ids=lambda ask: ask.__name__)
def test_the_kernel_tells_what_was_read_and_what_was_dropped(
    file: LocalFile, ask: Callable[[int, int, int], int | None]
) -> None:
    file.read(0, SIZE)
    if (share := cached_share([file], [ask])) is None:
        pytest.skip("this kernel does not tell")
    assert share == 1.0
    evict(file.path)
    assert cached_share([file], [ask]) == 0.0
    os.pread(file.fileno(), SAMPLE, 0)
    assert 0 < cached_share([file], [ask]) <= 1.0  # type: ignore[operator]


def test_a_file_is_asked_about_once(file: LocalFile) -> None:
    asked: list[int] = []

    def share(files: object) -> float:
        asked.append(1)
        return 0.5

    states = FileStates(local=lambda file: True, share=share)
    assert states.is_cold(file) and states.is_cold(file)
    assert len(asked) == 1
    assert not FileStates(local=lambda file: True, share=lambda files: None).is_cold(file)
    assert not FileStates(local=lambda file: False, share=share).is_cold(file)
    assert len(asked) == 1
