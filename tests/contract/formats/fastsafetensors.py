"""``fastsafetensors``: safetensors files, read by the library of that name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from contract.formats.base import MatrixFormat
from loadkit.testing import write_checkpoint


class FastSafetensors(MatrixFormat):
    load_format = "fastsafetensors"
    distribution = "loadkit-fastsafetensors"
    remote_plan = True

    def write(
        self, folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any], source: Path
    ) -> None:
        write_checkpoint(folder, weights)


FORMATS = [FastSafetensors()]
