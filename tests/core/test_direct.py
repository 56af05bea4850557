"""``direct`` reads whole blocks past the page cache; in place where memory lies as the file."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import loadkit
from helpers.checkpoints import write_llama
from helpers.cold import disk_bytes, evict
from helpers.extents import SIZE, check, content, extent, held, open_descriptors
from loadkit.config import LoadConfig
from loadkit.errors import ChangedError, ReadError
from loadkit.readers import direct
from loadkit.readers.base import Extent, Place
from loadkit.readers.direct import BLOCK, GAP, WINDOW, DirectReader, takes_direct
from loadkit.readers.page_cache import cached_share
from loadkit.sources.local_file import LocalFile


@pytest.fixture(autouse=True)
def _on_a_disk(file: LocalFile) -> None:
    if not takes_direct(file):
        pytest.skip("the file system of the test's folder has no O_DIRECT")


def at(file: LocalFile, offset: int, nbytes: int, shift: int) -> Extent:
    """A run whose memory begins ``shift`` bytes after where a block of the file would put it."""
    memory = mmap.mmap(-1, nbytes + 2 * BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    begin = (offset + shift) % BLOCK
    return Extent(file, offset, nbytes, 1, nbytes, flat[begin : begin + nbytes], nbytes, "t")


@pytest.mark.parametrize("shift", [0, 64], ids=["in place", "through the buffer"])
@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [
        pytest.param(0, SIZE, id="all"),
        pytest.param(1, SIZE - 1, id="to the last byte, in the middle of a block"),
        pytest.param(BLOCK, 40 * BLOCK, id="whole blocks"),
        pytest.param(5000, 100, id="inside a block"),
        pytest.param(8000, 200_000, id="from block to block"),
    ],
)
def test_any_run_is_read_whatever_its_borders(
    tmp_path: Path, offset: int, nbytes: int, shift: int
) -> None:
    data = content(SIZE)[: SIZE - 1000]  # the last block is a part of one
    (tmp_path / "weights.bin").write_bytes(data)
    opened = LocalFile("weights.bin", str(tmp_path / "weights.bin"))
    nbytes = min(nbytes, len(data) - offset)
    wanted = at(opened, offset, nbytes, shift)
    reader = DirectReader(LoadConfig(num_threads=2))
    first, last = offset // BLOCK * BLOCK, -(-(offset + nbytes) // BLOCK) * BLOCK
    assert reader.read([wanted]) == min(last, len(data)) - first
    assert held(wanted) == data[offset : offset + nbytes]
    reader.close()
    opened.close()


def test_memory_that_lies_as_the_file_does_is_read_into_in_place(
    file: LocalFile, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    honest = os.preadv

    def watching(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        seen.extend(
            (torch.frombuffer(buffer, dtype=torch.uint8).data_ptr(), len(buffer))
            for buffer in buffers
        )
        return honest(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", watching)
    wanted = at(file, 6000, 500_000, 0)
    reader = DirectReader(LoadConfig(num_threads=1))
    reader.read([wanted])
    start, end = wanted.dest.data_ptr(), wanted.dest.data_ptr() + 500_000
    inside = [nbytes for address, nbytes in seen if start <= address < end]
    assert inside == [500_000 // BLOCK * BLOCK - BLOCK]
    assert held(wanted) == path.read_bytes()[6000:506_000]
    reader.close()


def test_bytes_that_two_want_reach_both(file: LocalFile, path: Path) -> None:
    both = [at(file, 0, 300_000, 0), at(file, 0, 300_000, 0), at(file, 100_000, 300_000, 0)]
    check(DirectReader(LoadConfig()), both, path.read_bytes())


def test_blocks_at_the_borders_count_whole_and_shared_ones_once(file: LocalFile) -> None:
    reader = DirectReader(LoadConfig())

    def of(*places: tuple[int, int, int, int]) -> tuple[int, int]:
        return reader.survey([Place(file, *place) for place in places])

    assert of((5000, 100, 1, 100)) == (BLOCK, 1)
    assert of((4000, 100, 1, 100)) == (2 * BLOCK, 1)
    assert of((5000, 100, 1, 100), (5200, 100, 1, 100)) == (BLOCK, 1)
    assert of((0, 10, 3, BLOCK)) == (3 * BLOCK, 1)
    assert of((0, 10, 3, GAP + 3 * BLOCK)) == (3 * BLOCK, 3)
    assert of((0, SIZE, 1, SIZE)) == (SIZE, -(-SIZE // WINDOW))
    assert of((0, 0, 5, 10), (0, 5, 0, 10)) == (0, 0)
    reader.close()


def test_nothing_is_left_in_the_page_cache_and_the_count_is_the_disks(tmp_path: Path) -> None:
    big = tmp_path / "big.bin"
    big.write_bytes(content(1 << 20) * 24)
    evict(big)
    opened = LocalFile("big.bin", str(big))
    wanted = [extent(opened, 5000 + n * (4 << 20), 2 << 20) for n in range(5)]
    reader = DirectReader(LoadConfig())
    before = disk_bytes()
    counted = reader.read(wanted)
    taken = disk_bytes() - before
    assert counted == 5 * ((2 << 20) + BLOCK)
    assert taken in (0, counted)  # a disk in memory does not count
    assert cached_share([opened]) == 0
    reader.close()
    opened.close()


def test_memory_stays_bounded_however_much_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = tmp_path / "big.bin"
    big.write_bytes(content(1 << 20) * 40)
    opened = LocalFile("big.bin", str(big))
    reader = DirectReader(LoadConfig(num_threads=3))
    reader.read([extent(opened, 1, (40 << 20) - 1)])
    assert 1 <= len(reader._buffers) <= 3
    assert sum(map(len, reader._buffers)) <= 3 * WINDOW
    reader.close()
    assert not reader._buffers
    opened.close()


def test_a_file_system_that_refuses_to_open_is_told_before_anything_is_read(
    tmp_path: Path, file: LocalFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_llama(tmp_path)
    honest = os.open

    def refuse(path: str, flags: int, *rest: int, **more: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return honest(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    assert not takes_direct(file)
    with pytest.raises(ReadError) as caught:
        loadkit.plan(tmp_path, load_config=LoadConfig(reader="direct"))
    assert (caught.value.code, caught.value.errno) == ("E_IO", errno.EINVAL)
    assert caught.value.file is not None and caught.value.file.endswith(".safetensors")
    assert caught.value.hint == "choose the reader 'auto' or 'pread'"


def test_a_file_system_that_refuses_to_read_is_told_with_the_tensor(
    file: LocalFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "preadv", refuse)
    assert not takes_direct(file)
    reader = DirectReader(LoadConfig())
    with pytest.raises(ReadError) as caught:
        reader.read([extent(file, 5000, 10, tensor="w")])
    assert (caught.value.errno, caught.value.tensor) == (errno.EINVAL, "w")
    assert "no O_DIRECT" in str(caught.value.hint) and "'pread'" in str(caught.value.hint)
    reader.close()


def test_a_system_without_the_flag_says_so(
    file: LocalFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_DIRECT")
    with pytest.raises(ReadError, match="this system has no O_DIRECT"):
        DirectReader(LoadConfig()).survey([Place(file, 0, 1, 1, 1)])


def test_a_file_that_was_replaced_since_it_was_opened_is_not_taken_for_it(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(content(5000))
    opened = LocalFile("weights.bin", str(path))
    path.unlink()
    with pytest.raises(ChangedError, match="removed"):
        DirectReader(LoadConfig()).survey([Place(opened, 0, 1, 1, 1)])
    path.write_bytes(content(5000, seed=1))
    with pytest.raises(ChangedError, match="replaced"):
        DirectReader(LoadConfig()).survey([Place(opened, 0, 1, 1, 1)])
    opened.close()


def test_descriptors_are_closed_with_the_reader_or_without_it(file: LocalFile) -> None:
    before = len(open_descriptors())
    reader = DirectReader(LoadConfig())
    reader.survey([Place(file, 0, 1, 1, 1)])
    assert len(open_descriptors()) == before + 1
    del reader
    assert len(open_descriptors()) == before


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no tmpfs at /dev/shm")
def test_a_tmpfs_is_read_or_refused_by_name(tmp_path: Path) -> None:
    path = Path("/dev/shm") / f"loadkit-{os.getpid()}.bin"
    path.write_bytes(data := content(300_000))
    opened = LocalFile("shm.bin", str(path))
    reader = DirectReader(LoadConfig())
    try:
        if takes_direct(opened):
            check(reader, [extent(opened, 7, 290_000)], data)
        else:
            with pytest.raises(ReadError, match=r"shm\.bin"):
                reader.read([extent(opened, 7, 290_000)])
    finally:
        reader.close()
        opened.close()
        path.unlink()


def test_no_window_is_a_gap_alone() -> None:
    assert direct.GAP + 2 * BLOCK < WINDOW
