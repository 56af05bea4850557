"""The default loader keeps the contract that it sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from loadkit.testing import LoaderContract, write_checkpoint


class TestSafetensors(LoaderContract):
    load_format = "safetensors"

    def write(self, folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        write_checkpoint(folder, weights)


class TestSafetensorsOwned(TestSafetensors):
    load_options = {"alias": "never", "reader": "pread"}
