"""``mistral``: ``consolidated.safetensors`` and ``params.json``, with Mistral's own names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from contract.formats.base import MatrixFormat
from helpers.mistral_files import write_mistral


class Mistral(MatrixFormat):
    load_format = "mistral"
    distribution = "loadkit-default"
    zero_copy = True
    streamed = True
    remote_plan = True

    def write(
        self, folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any], source: Path
    ) -> None:
        (folder / "config.json").unlink()
        write_mistral(folder, weights, config)


FORMATS = [Mistral()]
