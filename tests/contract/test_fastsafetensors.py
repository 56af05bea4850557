"""The load format ``fastsafetensors`` and its reader keep the contracts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from loadkit.testing import LoaderContract, ReaderContract, write_checkpoint

pytest.importorskip("fastsafetensors")


class TestFastSafetensors(LoaderContract):
    load_format = "fastsafetensors"
    extra_config = {"max_threads": 2}

    def write(self, folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        write_checkpoint(folder, weights)


class TestFastSafetensorsReader(ReaderContract):
    reader = "fastsafetensors"
