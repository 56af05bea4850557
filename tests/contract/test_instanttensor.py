"""The load format ``instanttensor`` keeps the contract where it can be used at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from loadkit.testing import LoaderContract, write_checkpoint

pytestmark = pytest.mark.gpu


class TestInstantTensor(LoaderContract):
    load_format = "instanttensor"

    def write(self, folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        write_checkpoint(folder, weights)
