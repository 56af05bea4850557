"""A reader's threads: joined whatever happens, and nothing left behind."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers.extents import (
    READERS,
    check,
    content,
    extent,
    mixed_extents,
    open_descriptors,
    reader_threads,
    small_pieces,
)
from loadkit.config import LoadConfig
from loadkit.readers import runs
from loadkit.readers.base import Reader
from loadkit.readers.pread import PreadReader
from loadkit.sources.local_file import LocalFile


@pytest.mark.parametrize("in_helper", [False, True], ids=["in the caller", "in a helper"])
def test_an_interrupt_joins_the_threads_within_two_seconds(
    file: LocalFile, monkeypatch: pytest.MonkeyPatch, in_helper: bool
) -> None:
    main = threading.main_thread()
    sent = threading.Event()

    def slow(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        is_main = threading.current_thread() is main
        if is_main == (not in_helper) and not sent.is_set():
            sent.set()
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        return sum(map(len, buffers))

    monkeypatch.setattr(os, "preadv", slow)
    small_pieces(monkeypatch, 4096)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        PreadReader(LoadConfig(num_threads=4)).read([extent(file, 0, 2 << 20)])
    assert time.monotonic() - start < 2
    assert reader_threads() == []


def test_an_interrupt_while_waiting_for_the_last_thread_still_joins_it(
    file: LocalFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = threading.main_thread()
    finished = threading.Event()

    def slow(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if threading.current_thread() is not main:
            time.sleep(0.2)
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.1)
            finished.set()
        return sum(map(len, buffers))

    monkeypatch.setattr(os, "preadv", slow)
    small_pieces(monkeypatch, 1 << 20)
    with pytest.raises(KeyboardInterrupt):
        PreadReader(LoadConfig(num_threads=2)).read([extent(file, 0, 2 << 20)])
    assert finished.is_set()
    assert reader_threads() == []


def test_a_machine_without_free_threads_reads_with_the_callers(
    reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "big.bin").write_bytes(data := content(runs.PIECE + 5))
    opened = LocalFile("big.bin", str(tmp_path / "big.bin"))

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    check(reader, [extent(opened, 0, runs.PIECE + 5)], data)
    opened.close()


def test_reading_leaves_no_thread_and_no_descriptor(path: Path) -> None:
    gc.collect()
    before = open_descriptors()
    for kind in READERS:
        opened = LocalFile("weights.bin", str(path))
        reader = kind(LoadConfig(num_threads=4))
        for _ in range(3):
            reader.read(mixed_extents(opened))
        reader.close()
        reader.close()
        opened.close()
        del reader
    gc.collect()
    assert open_descriptors() == before
    assert reader_threads() == []
