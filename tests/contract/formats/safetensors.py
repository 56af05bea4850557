"""``safetensors`` and ``hf``: what Hugging Face's savers write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from contract.formats.base import MatrixFormat
from loadkit.testing import write_checkpoint


class Safetensors(MatrixFormat):
    load_format = "safetensors"
    distribution = "loadkit-default"
    zero_copy = True
    streamed = True
    remote_plan = True
    save = True

    def write(
        self, folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any], source: Path
    ) -> None:
        write_checkpoint(folder, weights)


class HF(Safetensors):
    load_format = "hf"
    save = False  # it is a way to find files; they are saved as safetensors


FORMATS = [Safetensors(), HF()]
