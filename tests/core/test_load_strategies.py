"""lazy, eager and prefetch: three ways to the same bytes; options that contradict each other."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import loadkit
from helpers.checkpoints import write_llama, write_st
from helpers.extents import extent
from helpers.watching import loadkit_threads, watched_reads
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.errors import OptionError, ReadFailure
from loadkit.load_strategy import Surroundings, reader_for
from loadkit.readers import eager
from loadkit.readers.base import Place
from loadkit.readers.prefetch import PrefetchingReader
from loadkit.readers.warming import Lane, Warmer
from loadkit.resolve import resolve
from loadkit.safetensors_format import read_header
from loadkit.sources.local_file import LocalFile

STRATEGIES = ["lazy", "eager", "prefetch"]


def by(strategy: str | None, **options: Any) -> LoadConfig:
    return LoadConfig(safetensors_load_strategy=strategy, **options)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder)
    return folder


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The case's file: 200 tensors of 1000 numbers."""
    folder = tmp_path_factory.mktemp("many")
    generator = torch.Generator().manual_seed(1)
    write_st(
        folder / "model.safetensors",
        {f"w{i}": torch.randn(1000, generator=generator) for i in range(200)},
    )
    return folder


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", ["auto", "float64"])
def test_SPD_01_every_strategy_gives_the_same_model(llama: Path, strategy: str, dtype: str) -> None:
    plain = loadkit.load(llama, dtype=dtype).model.state_dict()
    for rank in range(2):
        parallel = ParallelConfig(tp_size=2, tp_rank=rank)
        one = loadkit.load(llama, dtype=dtype, parallel=parallel)
        two = loadkit.load(llama, dtype=dtype, parallel=parallel, load_config=by(strategy))
        for name, tensor in one.model.state_dict().items():
            assert torch.equal(two.model.state_dict()[name], tensor), name
        assert two.report.bytes_read == two.plan.bytes_to_read
        assert f"safetensors_load_strategy is '{strategy}'" in two.report.reader_why
    whole = loadkit.load(llama, dtype=dtype, load_config=by(strategy)).model.state_dict()
    assert all(torch.equal(whole[name], tensor) for name, tensor in plain.items())
    assert not loadkit_threads()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_SPD_01_every_strategy_gives_the_same_tensors(many: Path, strategy: str) -> None:
    plain = dict(loadkit.iter_weights(many))
    found = dict(loadkit.iter_weights(many, load_config=by(strategy)))
    assert list(found) == list(plain)
    assert all(torch.equal(found[name], tensor) for name, tensor in plain.items())
    assert not loadkit_threads()


def test_SPD_01_eager_is_one_pass_in_large_reads(
    many: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eager, "WINDOW", 64 << 10)
    with watched_reads(monkeypatch) as reads:
        tensors = dict(loadkit.iter_weights(many, load_config=by("eager")))
    file = LocalFile("model.safetensors", str(many / "model.safetensors"))
    start = read_header(file).tensors[0].offset
    file.close()
    data = file.size - start
    assert len(tensors) == 200
    assert len(reads.calls) == -(-data // (64 << 10))
    assert reads.nbytes == data  # each byte once
    at = start
    for _, offset, asked in reads.calls:
        assert offset == at
        at += asked
    assert all(asked == 64 << 10 for _, _, asked in reads.calls[:-1])


def test_SPD_01_eager_never_has_a_file_in_memory(
    many: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eager, "WINDOW", 64 << 10)
    with watched_reads(monkeypatch) as reads:
        for _ in loadkit.iter_weights(many, load_config=by("eager")):
            assert reads.nbytes <= 64 << 10
            break


@pytest.mark.parametrize("window", [1000, 4096, 1 << 20])
def test_SPD_01_eager_reads_a_ranks_part_in_file_order(
    llama: Path, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eager, "WINDOW", window)
    parallel = ParallelConfig(tp_size=2, tp_rank=1)
    expected = loadkit.load(llama, parallel=parallel).model.state_dict()
    with watched_reads(monkeypatch) as reads:
        found = loadkit.load(llama, parallel=parallel, load_config=by("eager"))
    offsets = [offset for _, offset, _ in reads.calls]
    assert offsets == sorted(offsets)
    assert reads.nbytes == found.report.bytes_read == found.plan.bytes_to_read
    assert len(reads.calls) == found.plan.requests
    for name, tensor in found.model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


# -- prefetching -----------------------------------------------------------------------------------


def test_prefetching_warms_only_what_the_rank_needs(llama: Path) -> None:
    warmed: list[tuple[int, int]] = []
    file = LocalFile("model.safetensors", str(llama / "model.safetensors"))
    reader = PrefetchingReader(
        reader_for(LoadConfig(reader="pread"), [file], "cpu").reader,
        warm=lambda f, start, end: warmed.append((start, end - start)),
    )
    wanted = [extent(file, 4000, 300), extent(file, 9000, 500)]
    reader.survey([Place(e.file, e.offset, e.row_bytes, 1, e.row_bytes) for e in wanted])
    assert reader.read(wanted) == 800
    reader.end()
    reader.close()
    file.close()
    assert sum(n for _, n in warmed) <= 800
    assert all(4000 <= at < 4300 or 9000 <= at < 9500 for at, _ in warmed)


def test_prefetching_never_runs_further_ahead_than_its_budget(tmp_path: Path) -> None:
    path = tmp_path / "w"
    path.write_bytes(bytes(1 << 20))
    file = LocalFile("w", str(path))
    warmed = [0]
    warmer = Warmer(
        3, 4096, 16384, lambda f, start, end: warmed.__setitem__(0, warmed[0] + end - start)
    )
    lane = Lane([(file, 0, 1 << 20)])
    warmer.add(lane)
    for _ in range(64):
        warmer.use(lane, 8192)
        assert warmer.most_ahead <= 16384
    _until(lambda: lane.issued >= lane.used)
    assert warmer.most_ahead > 4096  # and it does run ahead
    warmer.cancel()
    assert not loadkit_threads()
    assert warmed[0] <= 64 * 8192 + 16384 < 1 << 20
    file.close()


def test_prefetching_stops_while_nobody_uses_what_is_warm(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(bytes(1 << 20))
    file = LocalFile("w", str(tmp_path / "w"))
    warmed: list[int] = []
    warmer = Warmer(2, 4096, 20000, lambda f, start, end: warmed.append(end - start))
    lane = Lane([(file, 0, 1 << 20)])
    warmer.add(lane)
    _until(lambda: sum(warmed) == 16384)
    warmer.use(lane, 4096)
    _until(lambda: sum(warmed) == 20480)
    warmer.drain()  # the end: the rest is warmed, and the threads have ended
    assert sum(warmed) == 1 << 20
    assert not loadkit_threads()
    file.close()


def test_what_was_used_before_it_was_warmed_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(bytes(10_000))
    file = LocalFile("w", str(tmp_path / "w"))
    lane = Lane([(file, 0, 3000), (file, 5000, 8000)])
    lane.use(3500)
    assert lane.next(1000) == (file, 5500, 6500)
    lane.give_back(1000)
    assert lane.next(2000) == (file, 5500, 7500)
    assert lane.next(2000) == (file, 7500, 8000)
    assert lane.next(2000) is None
    lane.give_back(500)
    assert lane.next(2000) == (file, 7500, 8000)
    file.close()


def test_gaps_that_are_warmed_and_not_read_do_not_stop_it(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(bytes(1 << 20))
    file = LocalFile("w", str(tmp_path / "w"))
    warmer = Warmer(1, 4096, 8192, lambda f, start, end: None)
    lane = Lane([(file, 0, 1 << 20)], expected=1 << 17)  # one byte of eight is read
    warmer.add(lane)
    for _ in range(32):
        warmer.use(lane, 1 << 12)
    _until(lambda: lane.issued == 1 << 20)
    warmer.cancel()
    file.close()


def test_an_error_of_the_reader_ends_the_threads(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(descriptor: int, buffers: Any, offset: int, *flags: int) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    config = by("prefetch", alias="never", reader="pread")
    with pytest.raises(ReadFailure):
        loadkit.load(llama, load_config=config)
    assert not loadkit_threads()


def test_a_range_that_cannot_be_warmed_is_told_and_does_not_fail_the_load(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def broken(descriptor: int, buffers: Any, offset: int, *flags: int) -> int:
        if threading.current_thread().name == "loadkit-prefetch":
            raise OSError(5, "Input/output error")
        return real(descriptor, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", broken)
    report = loadkit.load(llama, load_config=by("prefetch")).report
    assert any("prefetching stopped early" in warning for warning in report.warnings)


def _until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


# -- the choice ------------------------------------------------------------------------------------


def _around(kind: str, share: float | None, memory: int | None) -> Surroundings:
    return Surroundings(lambda file: kind, lambda files: share, lambda: memory)


@pytest.mark.parametrize(
    ("kind", "share", "memory", "prefetches"),
    [
        ("nfs4", 0.0, 1 << 40, True),
        ("lustre", 0.5, 1 << 40, True),
        ("fuse.s3fs", 0.1, 1 << 40, True),
        ("nfs4", 1.0, 1 << 40, False),  # warm already
        ("nfs4", None, 1 << 40, False),  # nobody can tell
        ("nfs4", 0.0, 10, False),  # does not fit
        ("ext4", 0.0, 1 << 40, False),  # the kernel's own read-ahead does
        ("", 0.0, 1 << 40, False),
    ],
)
def test_SPD_01_auto_prefetches_where_it_helps_and_says_why(
    llama: Path, kind: str, share: float | None, memory: int | None, prefetches: bool
) -> None:
    file = LocalFile("model.safetensors", str(llama / "model.safetensors"))
    choice = reader_for(LoadConfig(), [file], "cpu", _around(kind, share, memory))
    assert isinstance(choice.reader, PrefetchingReader) == prefetches
    assert ("network file system" in choice.why) == prefetches
    assert not prefetches or kind in choice.why
    choice.reader.close()
    named = reader_for(LoadConfig(reader="pread"), [file], "cpu", _around(kind, share, memory))
    assert not isinstance(named.reader, PrefetchingReader)  # what was named is what is used
    named.reader.close()
    file.close()


def test_SPD_01_lazy_maps_no_file_whose_faults_may_hang(llama: Path) -> None:
    file = LocalFile("model.safetensors", str(llama / "model.safetensors"))
    local = reader_for(by("lazy"), [file], "cpu", _around("ext4", 0.0, None))
    remote = reader_for(by("lazy"), [file], "cpu", _around("nfs4", 0.0, None))
    assert (local.reader.name, remote.reader.name) == ("mmap", "pread")
    assert "nfs4" in remote.why
    for choice in (local, remote):
        choice.reader.close()
    file.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"safetensors_load_strategy": "torchao"}, "comes? with that quantisation method"),
        ({"safetensors_load_strategy": "lazy", "reader": "pread"}, "'lazy'.*'pread'"),
        ({"safetensors_load_strategy": "eager", "reader": "mmap"}, "'eager'.*'mmap'"),
        ({"safetensors_load_strategy": "prefetch", "reader": "direct"}, "'prefetch'.*'direct'"),
        ({"safetensors_load_strategy": "eager", "num_threads": 4}, "'eager'.*num_threads = 4"),
        ({"reader": "eager", "num_threads": 4}, "'eager'.*num_threads = 4"),
        (
            {"safetensors_load_strategy": "lazy", "safetensors_prefetch_num_threads": 2},
            "safetensors_prefetch_num_threads=2, .*'lazy'",
        ),
        (
            {"safetensors_load_strategy": "eager", "safetensors_prefetch_block_size": 8192},
            "safetensors_prefetch_block_size=8192, .*'eager'",
        ),
        ({"safetensors_prefetch_num_threads": 2}, "prefetches nothing: auto found no need"),
        ({"digest_store": "none"}, "verify = 'size'.*digest_store = 'none'"),
        ({"model_loader_extra_config": {"num_threads": 4}}, "without enable_multithread_load"),
        ({"model_loader_extra_config": {"byte_budget": 4}}, "without enable_multithread_load"),
        (
            {
                "model_loader_extra_config": {"enable_multithread_load": True},
                "safetensors_load_strategy": "eager",
            },
            "one thread",
        ),
        (
            {
                "model_loader_extra_config": {"enable_multithread_load": True, "num_threads": 3},
                "num_threads": 2,
            },
            "num_threads is 2, and .* is 3",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    llama: Path, options: dict[str, Any], said: str
) -> None:
    config = LoadConfig(**options)
    with pytest.raises(OptionError, match=said) as caught:
        loadkit.plan(llama, load_config=config)
    assert caught.value.detail["options"] and caught.value.hint
    with pytest.raises(OptionError, match=said):
        next(loadkit.iter_weights(llama, load_config=config))


@pytest.mark.parametrize("extra", [{}, {"num_threads": 3}])
def test_multithreaded_loading_is_so_many_threads_of_the_reader(
    llama: Path, extra: dict[str, int]
) -> None:
    config = LoadConfig(model_loader_extra_config={"enable_multithread_load": True, **extra})
    job = resolve(llama, load_config=config)
    assert job.load_config.num_threads == extra.get("num_threads", 8)
    job.close()
    plain = loadkit.load(llama).model.state_dict()
    found = loadkit.load(llama, load_config=config).model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in plain.items())
