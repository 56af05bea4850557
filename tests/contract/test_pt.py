"""Archives of ``torch.save`` keep the contract, whichever way they are found; npcache too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from loadkit.config import LoadConfig
from loadkit.testing import LoaderContract


class TestPt(LoaderContract):
    load_format = "pt"

    def write(self, folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        torch.save(weights, folder / "pytorch_model.bin")

    damage_names = ("file", "offset", "hint")  # a zip archive's directory is at its end


class TestHFFallsBack(TestPt):
    load_format = "hf"

    def write(self, folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        names = sorted(weights)
        for number, part in enumerate((names[::2], names[1::2]), 1):
            path = folder / f"pytorch_model-{number:05d}-of-00002.bin"
            torch.save({name: weights[name] for name in part}, path)


class TestLegacy(TestPt):
    damage_names = LoaderContract.damage_names

    def write(self, folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        path = folder / "pytorch_model.bin"
        torch.save(weights, path, _use_new_zipfile_serialization=False)


class TestNpcache(TestPt):
    load_format = "npcache"

    def load_config(self, **changes: Any) -> LoadConfig:
        cache = str(self._factory.getbasetemp() / "np-cache")
        return super().load_config(**{"cache_dir": cache, **changes})
