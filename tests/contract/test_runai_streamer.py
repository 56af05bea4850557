"""The streamer's load format and its reader keep the contracts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from loadkit.testing import LoaderContract, ReaderContract, write_checkpoint

pytest.importorskip("runai_model_streamer")


class TestRunaiStreamer(LoaderContract):
    load_format = "runai_streamer"
    extra_config = {"concurrency": 2, "memory_limit": 1 << 20}

    def write(self, folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        write_checkpoint(folder, weights)


class TestRunaiReader(ReaderContract):
    reader = "runai"
