"""A load that is stopped half-way, at any of its tensors: one typed error, and nothing is left."""

from __future__ import annotations

import ctypes
import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import loadkit
from helpers.checkpoints import write_llama
from helpers.watching import loadkit_threads
from loadkit import storage_memory
from loadkit.config import LoadConfig
from loadkit.errors import ResourceError
from loadkit.readers import runs
from loadkit.report import anonymous_bytes

OWNED = LoadConfig(alias="never", reader="pread", num_threads=3)
SIZES: dict[str, Any] = {"hidden": 512, "heads": 8, "kv_heads": 8, "ffn": 1024, "vocab": 4000}
ALLOWED = 64 << 20  # bytes of memory that may stay, whatever keeps them
PARAMETERS = 15  # two layers of six, the embedding, the head and the last norm


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    write_llama(folder, **SIZES)
    return folder


class Nth:
    """A function that does something else the nth time it is called."""

    def __init__(self, real: Callable[..., Any], nth: int, instead: Callable[[], None]) -> None:
        self.real, self.nth, self.instead = real, nth, instead
        self.count = 0
        self.when = 0.0  # of something else
        self._lock = threading.Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            self.count += 1
            mine = self.count == self.nth
        if mine:
            self.when = time.monotonic()
            self.instead()
        return self.real(*args, **kwargs)


@pytest.fixture
def nothing_left(source: Path) -> Iterator[None]:
    """Fails if memory or a thread stays."""
    loadkit.load(source, load_config=OWNED)  # what the first load imports and keeps
    before, threads = held_bytes(), loadkit_threads()
    yield
    assert held_bytes() - before < ALLOWED
    assert loadkit_threads() == threads


def held_bytes() -> int:
    """Memory of this process, without what the C library keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
    return anonymous_bytes()


def test_a_failed_load_gives_its_memory_back_at_once(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = Nth(runs.fill, 0, refuse_python)
    monkeypatch.setattr(runs, "fill", fill)
    loadkit.load(source, load_config=OWNED)
    last = fill.count
    before = held_bytes()
    for _ in range(8):  # what the C library keeps is not the same each time
        fill.count, fill.nth = 0, last
        with pytest.raises(ResourceError) as caught:
            loadkit.load(source, load_config=OWNED)
        assert anonymous_bytes() - before < 4 << 20, caught  # the error is kept meanwhile


def refuse_python() -> None:
    raise MemoryError


def refuse_torch() -> None:
    torch.empty(1 << 58, dtype=torch.uint8)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("refuse", [refuse_python, refuse_torch])
def test_fault_32_memory_that_runs_out_at_any_tensor(
    source: Path, monkeypatch: pytest.MonkeyPatch, refuse: Callable[[], None]
) -> None:
    failed = 0
    for nth in range(1, 100):
        allocate = Nth(storage_memory.StorageMemory._new, nth, refuse)
        with monkeypatch.context() as patch:
            patch.setattr(storage_memory.StorageMemory, "_new", lambda *a, f=allocate: f(*a))
            try:
                loadkit.load(source, load_config=OWNED)
            except ResourceError as error:
                assert error.code == "E_MEMORY"
                failed += 1
            else:
                break
    assert failed == PARAMETERS


class Outside(nn.Module):
    """A module of the user's own, with real numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.norm = nn.LayerNorm(SIZES["hidden"], bias=False)
        self.lm_head = nn.Linear(SIZES["hidden"], SIZES["vocab"], bias=False)


def test_fault_32_a_module_that_may_be_half_written_says_so(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Outside()
    old = module.model.norm.weight.clone()
    monkeypatch.setattr(runs, "fill", Nth(runs.fill, 1, refuse_python))
    with pytest.raises(ResourceError):
        loadkit.load_into(module, source, load_config=OWNED, strict=False)
    assert "MemoryError" in module.__dict__["loadkit_unusable"]
    assert torch.equal(module.model.norm.weight, old)  # of this one nothing came
    loadkit.load_into(module, source, load_config=OWNED, strict=False)
    assert "loadkit_unusable" not in module.__dict__


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def interrupt_twice() -> None:
    """The second one comes while threads are joined."""
    again = threading.Timer(
        0.02, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]
    )
    again.start()
    signal.raise_signal(signal.SIGINT)


# The second interrupt may come while an object is finalised: Python can only print it there.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("how", [interrupt, interrupt_twice])
def test_fault_33_an_interrupt_at_any_read(
    source: Path, monkeypatch: pytest.MonkeyPatch, how: Callable[[], None]
) -> None:
    interrupted = 0
    for nth in range(1, 100):
        fill = Nth(runs.fill, nth, how)
        with monkeypatch.context() as patch:
            patch.setattr(runs, "fill", fill)
            threads = loadkit_threads()
            try:
                loadkit.load(source, load_config=OWNED)
            except KeyboardInterrupt:
                interrupted += 1
                assert time.monotonic() - fill.when < 2
                assert loadkit_threads() == threads
                settle()
            else:
                break
    assert interrupted == fill.count > 1


def settle() -> None:
    """Take the second interrupt here, where it came late."""
    try:
        time.sleep(0.05)
    except KeyboardInterrupt:
        pass


def test_fault_33_an_interrupted_module_says_so(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Outside()
    monkeypatch.setattr(runs, "fill", Nth(runs.fill, 1, interrupt))
    with pytest.raises(KeyboardInterrupt):
        loadkit.load_into(module, source, load_config=OWNED, strict=False)
    assert "KeyboardInterrupt" in module.__dict__["loadkit_unusable"]
