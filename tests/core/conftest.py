"""What the reader tests share: one file of known content, and every reader in turn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.extents import READERS, SIZE, content
from loadkit.config import LoadConfig
from loadkit.readers.base import Reader
from loadkit.sources.local_file import LocalFile


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("readers") / "weights.bin"
    found.write_bytes(content(SIZE))
    return found


@pytest.fixture(scope="module")
def file(path: Path) -> Iterator[LocalFile]:
    opened = LocalFile("weights.bin", str(path))
    yield opened
    opened.close()


@pytest.fixture(params=READERS, ids=lambda kind: kind.name)
def reader(request: pytest.FixtureRequest) -> Iterator[Reader]:
    made = request.param(LoadConfig(num_threads=3))
    yield made
    made.close()
