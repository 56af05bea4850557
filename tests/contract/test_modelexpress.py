"""The load format ``modelexpress`` keeps the contract, with files that a server sends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.formats.modelexpress import running, served
from loadkit.testing import LoaderContract, write_checkpoint

pytest.importorskip("modelexpress")


class TestModelExpress(LoaderContract):
    load_format = "modelexpress"
    read_ahead = 64 << 10

    @pytest.fixture(autouse=True)
    def _own_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MODEL_EXPRESS_CACHE_DIRECTORY", str(tmp_path / "cache"))
        running()

    def test_a_plan_reads_no_payload(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The server is in this process, so that what it reads ahead of a client would count."""

        def unhurried(name: str, pieces: Iterator[Any]) -> Iterator[Any]:
            yield next(pieces)
            for piece in pieces:
                time.sleep(0.2)
                yield piece

        monkeypatch.setattr(running()[0], "chunks", unhurried)
        super().test_a_plan_reads_no_payload()

    def test_what_landed_is_told_to_the_progress_bar(self) -> None:
        self.load(self.checkpoint())  # downloads have a bar of their own
        super().test_what_landed_is_told_to_the_progress_bar()

    def write(self, folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        write_checkpoint(folder, weights)

    def source(self, folder: Path) -> str | Path:
        return served(folder)
