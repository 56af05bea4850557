"""``pt``: what ``torch.save`` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from contract.formats.base import MatrixFormat


class Pt(MatrixFormat):
    load_format = "pt"
    distribution = "loadkit-default"
    streamed = True
    remote_plan = True
    zero_copy = True  # records begin at multiples of 64 bytes
    verified = "the archive's CRC-32"

    def write(
        self, folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any], source: Path
    ) -> None:
        torch.save(weights, folder / "pytorch_model.bin")


FORMATS = [Pt()]
