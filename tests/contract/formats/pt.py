"""``pt``: what ``torch.save`` writes, and what it wrote before 1.6."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from contract.formats.base import MatrixFormat


class Pt(MatrixFormat):
    load_format = "pt"
    distribution = "loadkit-default"
    zero_copy = True  # records begin at multiples of 64 bytes
    verified = "the archive's CRC-32"

    def write(
        self, folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any], source: Path
    ) -> None:
        torch.save(weights, folder / "pytorch_model.bin")


class Legacy(Pt):
    name = "pt (before 1.6)"
    zero_copy = False  # storages begin wherever the one before them ended
    verified = ""

    def write(
        self, folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any], source: Path
    ) -> None:
        path = folder / "pytorch_model.bin"
        torch.save(weights, path, _use_new_zipfile_serialization=False)


FORMATS = [Pt(), Legacy()]
