"""``npcache``: numpy files of a checkpoint, in a cache folder of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from contract.formats.base import MatrixFormat
from loadkit.config import LoadConfig


class Npcache(MatrixFormat):
    load_format = "npcache"
    distribution = "loadkit-default"
    zero_copy = True

    def write(
        self, folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any], source: Path
    ) -> None:
        self._cache = folder.parent / "np-cache"
        torch.save(weights, folder / "pytorch_model.bin")

    def load_config(self, **changes: Any) -> LoadConfig:
        return super().load_config(**{"cache_dir": str(self._cache), **changes})


FORMATS = [Npcache()]
