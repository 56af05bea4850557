"""Nothing lives longer than it is needed: in a load, while iterating, and after an error."""

from __future__ import annotations

import gc
import inspect
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import loadkit
from helpers.checkpoints import llama_sd, write_cfg, write_st
from helpers.gguf_files import lone_llama
from helpers.watching import live_bytes, loadkit_threads, watched_reads
from loadkit import storage_memory
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.errors import ReadError, ReadFailure
from loadkit.rank_process import RankProcess
from loadkit.readers.base import Reader
from loadkit.readers.pread import PreadReader
from loadkit.readers.threads import default_threads, threads_for
from loadkit.tables import readers
from loadkit.tracing import evaluate

HIDDEN, FFN, VOCAB, LAYERS = 256, 512, 1000, 3
LARGEST = VOCAB * HIDDEN * 4  # bytes of the embedding
SMALL = 64 << 10  # what this test does not count: views, norms, scratch
CHUNK = 8 << 20  # bytes of a target that are computed at once
THREADED = {
    "model_loader_extra_config": {
        "enable_multithread_load": True,
        "num_threads": 3,
        "byte_budget": 2 * LARGEST,
    }
}


def _safetensors(folder: Path) -> Path:
    write_cfg(
        folder,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        vocab_size=VOCAB,
        num_hidden_layers=LAYERS,
        num_key_value_heads=4,
    )
    state = llama_sd(hidden=HIDDEN, ffn=FFN, vocab=VOCAB, layers=LAYERS, kv_heads=4)
    write_st(folder / "model.safetensors", state)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _safetensors(tmp_path_factory.mktemp("safetensors"))


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lone_llama(tmp_path_factory.mktemp("gguf") / "toy.gguf", vocab=VOCAB * 16)


class Live:
    """Bytes of tensors that were made and are not gone, and the most there ever were."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._lock = threading.RLock()  # a finaliser may run inside of ``made``

    def made(self, tensor: torch.Tensor) -> torch.Tensor:
        nbytes = tensor.untyped_storage().nbytes()
        if nbytes >= SMALL:
            with self._lock:
                self.now += nbytes
                self.peak = max(self.peak, self.now)
            weakref.finalize(tensor.untyped_storage(), self._gone, nbytes)
        return tensor

    def _gone(self, nbytes: int) -> None:
        with self._lock:
            self.now -= nbytes


class _Watched:
    """A stand-in for the module ``torch`` whose ``empty`` is counted."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *args: Any, **options: Any) -> torch.Tensor:
        return self._live.made(torch.empty(*args, **options))


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Live:
    """What the read step allocates."""
    found = Live()
    for module in (storage_memory, evaluate):
        monkeypatch.setattr(module, "torch", _Watched(found))
    return found


@pytest.fixture
def failing() -> Callable[[int], str]:
    """A reader that fails when it has read so many bytes."""
    left = [0]

    class Failing(PreadReader):
        def read(self, extents: Any, landed: Any = None) -> int:
            for extent in extents:
                left[0] -= extent.rows * extent.row_bytes
                if left[0] < 0:
                    raise ReadError("the disk is gone", file=extent.file.name, errno=5)
                super().read([extent], landed)
            return sum(extent.rows * extent.row_bytes for extent in extents)

    def after(nbytes: int) -> str:
        left[0] = nbytes
        readers.register("failing", Failing, override=True)
        return "failing"

    return after


def _names_into(names: list[str], weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    for name, tensor in weights:
        names.append(name)
        del tensor


def _parameters(model: torch.nn.Module) -> int:
    return sum(p.untyped_storage().nbytes() for p in model.parameters())


@pytest.mark.parametrize("options", [{"reader": "pread"}, {"verify": "digest", "reader": "pread"}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tp", [1, 2])
def test_MEM_01_a_load_holds_its_parameters_and_one_buffer(
    llama: Path, live: Live, options: dict[str, Any], dtype: str, tp: int,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("LOADKIT_CACHE", str(tmp_path))
    parallel = ParallelConfig(tp_size=tp, tp_rank=tp - 1)
    config = LoadConfig(**options)
    model = loadkit.load(llama, dtype=dtype, parallel=parallel, load_config=config).model
    held = _parameters(model)
    assert held < live.peak + 4 * SMALL * LAYERS  # the watch sees the parameters
    # Beside them: one tensor's numbers before they are cast, in chunks.
    assert live.peak <= held + min(CHUNK, LARGEST)
    del model
    gc.collect()  # a module and its children know each other
    assert live.now == 0


def test_MEM_01_a_gguf_load_holds_its_parameters_and_one_chunk(gguf: Path, live: Live) -> None:
    model = loadkit.load(
        gguf, load_format="gguf", dtype="bfloat16", load_config=LoadConfig(reader="pread")
    ).model
    assert 0 < live.peak <= _parameters(model) + CHUNK


def test_MEM_01_a_dummy_load_holds_its_parameters_and_one_chunk(llama: Path, live: Live) -> None:
    before = live_bytes(SMALL)
    model = loadkit.load(llama, load_format="dummy").model
    assert live.peak <= _parameters(model) + CHUNK
    assert live_bytes(SMALL) - before <= _parameters(model)


@pytest.mark.parametrize(
    ("options", "ahead"),
    [
        ({}, 0),
        ({"safetensors_load_strategy": "eager"}, 0),
        ({"safetensors_load_strategy": "prefetch"}, 0),
        ({"verify": "digest"}, 0),
        (THREADED, 2 * LARGEST),
        ({**THREADED, "verify": "digest"}, 2 * LARGEST),
    ],
    ids=["plain", "eager", "prefetch", "digest", "threads", "threads digest"],
)
def test_MEM_01_iterating_holds_one_tensor_and_what_the_budget_allows(
    llama: Path, live: Live, options: dict[str, Any], ahead: int,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("LOADKIT_CACHE", str(tmp_path))
    total = 0
    for _, tensor in loadkit.iter_weights(llama, load_config=LoadConfig(**options)):
        total += tensor.nbytes
        if ahead:
            time.sleep(0.002)  # a slow caller: the threads would drain the files
        del tensor
    # The one that was handed out, and the one that is being made.
    assert live.peak <= ahead + 2 * LARGEST < total / 2
    assert live.now == 0


def test_MEM_01_a_caller_that_keeps_everything_is_what_it_costs(llama: Path, live: Live) -> None:
    """The watch sees a drained iterator: the bound above can fail."""
    kept = list(loadkit.iter_weights(llama))
    assert live.peak >= sum(t.nbytes for _, t in kept if t.nbytes >= SMALL) > 4 * LARGEST


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_MEM_01_a_load_that_failed_holds_nothing_while_its_error_is_kept(
    llama: Path, live: Live, failing: Callable[[int], str], dtype: str
) -> None:
    name = failing(3 * LARGEST)
    before = live_bytes(SMALL)
    with pytest.raises(ReadFailure) as caught:
        loadkit.load(llama, dtype=dtype, load_config=LoadConfig(reader=name))
    assert live.peak > LARGEST  # it was under way
    assert caught.value.__traceback__ is not None
    assert live.now == 0
    assert live_bytes(SMALL) == before
    assert not loadkit_threads()


@pytest.mark.parametrize("options", [{}, THREADED], ids=["plain", "threads"])
def test_MEM_01_iterating_that_failed_holds_nothing_while_its_error_is_kept(
    llama: Path, live: Live, failing: Callable[[int], str], options: dict[str, Any]
) -> None:
    config = LoadConfig(reader=failing(2 * LARGEST + 1), **options)
    given: list[str] = []
    weights = loadkit.iter_weights(llama, load_config=config)
    with pytest.raises(ReadFailure) as caught:
        _names_into(given, weights)
    assert given
    assert caught.value.__traceback__ is not None
    assert live.now == 0
    assert not loadkit_threads()


def test_MEM_01_an_error_that_was_being_handled_keeps_what_it_has(
    llama: Path, failing: Callable[[int], str]
) -> None:
    def mine() -> None:
        precious = "of the caller"
        raise KeyError(precious)

    name = failing(0)
    try:
        mine()
    except KeyError as error:
        with pytest.raises(ReadFailure):
            loadkit.load(llama, load_config=LoadConfig(reader=name))
        trace = error.__traceback__
        assert trace is not None and trace.tb_next is not None
        assert trace.tb_next.tb_frame.f_locals["precious"] == "of the caller"


def test_closing_an_iterator_early_leaves_no_thread_and_no_tensor(llama: Path, live: Live) -> None:
    weights = loadkit.iter_weights(llama, load_config=LoadConfig(**THREADED))
    next(weights)
    weights.close()  # type: ignore[attr-defined]
    assert not loadkit_threads()
    assert live.now == 0


# -- what a rank reads, and with how many threads --------------------------------------------------


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("reader", ["pread", "mmap", "eager"])
def test_SPD_03_a_rank_reads_its_part(
    llama: Path, tp: int, reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = (llama / "model.safetensors").stat().st_size
    whole = loadkit.load(llama, load_config=LoadConfig(reader="pread")).model
    norms = sum(p.nbytes for n, p in whole.named_parameters() if "norm" in n)
    for rank in range(tp):
        parallel = ParallelConfig(tp_size=tp, tp_rank=rank)
        config = LoadConfig(reader=reader, alias="never")
        plan = loadkit.plan(llama, parallel=parallel, load_config=config)
        with watched_reads(monkeypatch) as reads:
            report = loadkit.load(llama, parallel=parallel, load_config=config).report
        assert report.bytes_read == plan.bytes_to_read
        assert report.bytes_needed <= size / tp + norms + SMALL
        if reader != "mmap":  # which copies strided rows from its map
            assert reads.nbytes == report.bytes_read
        if reader == "eager":
            assert report.bytes_read <= size  # one pass over a file of one window


def test_SPD_03_threads_are_a_ranks_share_of_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    config = LoadConfig(local_ranks=8)
    assert default_threads(0, most=32) == 16
    assert threads_for(config, most=32) == 2
    assert threads_for(config, most=1) == 1
    assert threads_for(LoadConfig(local_ranks=64), most=32) == 1
    assert threads_for(LoadConfig(local_ranks=8, num_threads=5), most=4) == 5  # as asked
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")  # as torchrun says
    assert default_threads(0, most=32) == 4
    assert threads_for(config, most=32) == 2  # what was given goes first
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "many")
    assert default_threads(0, most=32) == 16


@pytest.mark.parametrize("reader", ["pread", "mmap"])
def test_SPD_03_readers_use_that_share(
    reader: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _made(reader, LoadConfig(local_ranks=2))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    assert _made(reader, LoadConfig(local_ranks=2))._threads == 2  # type: ignore[attr-defined]
    assert _made(reader, LoadConfig(local_ranks=4))._threads == 1  # type: ignore[attr-defined]
    assert _made(reader, LoadConfig(num_threads=7))._threads == 7  # type: ignore[attr-defined]
    made.close()


def _made(reader: str, config: LoadConfig) -> Reader:
    made: Reader = readers.lookup(reader)(config)  # type: ignore[operator]
    return made


def test_SPD_03_ranks_started_by_the_command_line_know_how_many_they_are() -> None:
    assert "LOCAL_WORLD_SIZE" in inspect.getsource(RankProcess)
