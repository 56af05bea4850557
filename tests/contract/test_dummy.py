"""A loader that reads nothing keeps what of the contract is meant for it."""

from __future__ import annotations

from loadkit.testing import LoaderContract


class TestDummy(LoaderContract):
    load_format = "dummy"
    reads_files = False
