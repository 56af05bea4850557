"""The core's readers keep the contract."""

from __future__ import annotations

from loadkit.testing import ReaderContract


class TestPread(ReaderContract):
    reader = "pread"


class TestMmap(ReaderContract):
    reader = "mmap"


class TestDirect(ReaderContract):
    reader = "direct"


class TestEager(ReaderContract):
    reader = "eager"


class TestRange(ReaderContract):
    reader = "range"
