"""A loader that reads nothing keeps what of the contract is meant for it."""

from __future__ import annotations

from loadkit.testing import LoaderContract


class TestDummy(LoaderContract):
    load_format = "dummy"
    reads_files = False
    # What malloc keeps of the counters; tests/core/test_load_memory.py watches what lives.
    peak_slack = 128 << 20
