"""Folders of torch.distributed.checkpoint keep the contract, as trainers save them too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from helpers.dcp_files import write_dcp
from loadkit.testing import LoaderContract


class TestDcp(LoaderContract):
    load_format = "dcp"

    def write(self, folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        write_dcp(folder, weights)


class TestTrainer(TestDcp):
    """A model's dict beside an optimizer's, a file for every item."""

    def write(self, folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        state = {name: {"exp_avg": torch.zeros_like(one)} for name, one in weights.items()}
        nested = {"model": weights, "optim": {"state": state}, "step": 3}
        write_dcp(folder, nested, single_file_per_rank=False)

    def damage(self, folder: Path) -> None:
        """The last of the model's files; optimizer's files count for nothing."""
        files = {path: path.read_bytes() for path in folder.glob("*.distcp")}
        path = max(files, key=lambda one: (b"\0" * 4096 not in files[one], len(files[one])))
        path.write_bytes(files[path][: len(files[path]) * 2 // 3])
