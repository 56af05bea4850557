"""Files that are not in the page cache, and what a process took from the disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from loadkit.readers.page_cache import cached_share
from loadkit.sources.local_file import LocalFile


def evict(*paths: str | Path) -> None:
    """Have files on the disk and not in memory; skips the test where that cannot be had."""
    for path in paths:
        opened = LocalFile("evicted", str(path))
        try:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            share = cached_share([opened])
        finally:
            opened.close()
        if share is None or share > 0:
            pytest.skip("files cannot be dropped from the page cache here")


def disk_bytes() -> int:
    """Bytes that this process had read from storage."""
    for line in Path("/proc/self/io").read_text().splitlines():
        name, _, value = line.partition(": ")
        if name == "read_bytes":
            return int(value)
    raise AssertionError("no read_bytes in /proc/self/io")
