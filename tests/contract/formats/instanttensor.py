"""``instanttensor``: safetensors files, read by the library of that name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from contract.formats.base import MatrixFormat
from loadkit.testing import write_checkpoint


class InstantTensor(MatrixFormat):
    load_format = "instanttensor"
    distribution = "loadkit-instanttensor"
    tp_slices = False  # tensors are brought whole
    remote_plan = True

    def write(
        self, folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any], source: Path
    ) -> None:
        write_checkpoint(folder, weights)


FORMATS = [InstantTensor()]
