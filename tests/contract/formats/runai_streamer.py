"""``runai_streamer``: safetensors files, read by the Run:ai model streamer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from contract.formats.base import MatrixFormat
from loadkit.testing import write_checkpoint


class RunaiStreamer(MatrixFormat):
    load_format = "runai_streamer"
    distribution = "loadkit-runai-streamer"
    streamed = True  # from object stores that the streamer has a plugin for
    remote_plan = True

    def write(
        self, folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any], source: Path
    ) -> None:
        write_checkpoint(folder, weights)


FORMATS = [RunaiStreamer()]
