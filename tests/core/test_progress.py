"""The bar counts bytes that landed, up to what the plan said, and only where somebody looks."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import loadkit
from helpers.checkpoints import write_llama
from loadkit.config import LoadConfig, ParallelConfig


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Bar:
    """What is asked of tqdm."""

    made: list[Bar]

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.landed = 0
        self.closed = False
        Bar.made.append(self)

    def update(self, n: int) -> None:
        assert n > 0
        self.landed += n

    def close(self) -> None:
        self.closed = True


def look(monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO | None) -> None:
    """What the bar takes for stderr (pytest puts its own into ``sys`` for each phase of a test)."""
    monkeypatch.setattr("loadkit.progress.sys", SimpleNamespace(stderr=stderr))


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Bar]:
    Bar.made = []
    monkeypatch.setattr("tqdm.auto.tqdm", Bar)
    look(monkeypatch, Terminal())
    return Bar.made


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"alias": "never"}, {"reader": "pread"}], ids=str)
def test_the_bytes_that_landed_are_those_of_the_plan(
    tmp_path: Path, bars: list[Bar], options: dict[str, str], dtype: str, tp: int
) -> None:
    write_llama(tmp_path, shards=2)
    rank = ParallelConfig(tp_size=tp, tp_rank=tp - 1)
    config = LoadConfig(**options)
    result = loadkit.load(tmp_path, load_config=config, dtype=dtype, parallel=rank)
    (bar,) = bars
    assert bar.options["total"] == bar.landed == result.report.bytes_read > 0
    assert bar.options["unit"] == "B" and bar.closed


def test_there_is_no_bar_and_no_thread_where_nobody_looks(
    tmp_path: Path, bars: list[Bar], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_llama(tmp_path)
    before = set(threading.enumerate())  # a bar of another library may have left its monitor
    loadkit.load(tmp_path, load_config=LoadConfig(use_tqdm_on_load=False))
    look(monkeypatch, io.StringIO())
    loadkit.load(tmp_path)
    look(monkeypatch, None)  # pythonw, some daemons
    loadkit.load(tmp_path)
    assert bars == []
    assert set(threading.enumerate()) <= before


def test_a_shown_bar_leaves_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_llama(tmp_path)
    look(monkeypatch, Terminal())
    before = set(threading.enumerate())
    loadkit.load(tmp_path)
    assert set(threading.enumerate()) <= before


def test_a_bar_is_closed_when_the_load_fails(
    tmp_path: Path, bars: list[Bar], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_llama(tmp_path)

    def fail(*_: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("loadkit.readers.pread.PreadReader.read", fail)
    with pytest.raises(KeyboardInterrupt):
        loadkit.load(tmp_path, load_config=LoadConfig(reader="pread"))
    assert [bar.closed for bar in bars] == [True]
