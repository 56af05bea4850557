"""Rank files keep the contract: cut anew from one rank's, or read as they were saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import loadkit
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.testing import LoaderContract, write_checkpoint

QUIET = LoadConfig(load_format="safetensors", use_tqdm_on_load=False)


class TestCutAnew(LoaderContract):
    load_format = "sharded_state"
    free_form = False  # only a whole model is saved so

    def write(self, folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        self.save(folder, weights, config, 1)

    def save(
        self, folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any], tp: int
    ) -> None:
        plain = write_checkpoint(folder.parent / f"{folder.name}-plain", weights, config)
        for rank in range(tp):
            parallel = ParallelConfig(tp_size=tp, tp_rank=rank)
            model = loadkit.load_model(
                plain, dtype=self.dtype, parallel=parallel, load_config=QUIET
            )
            loadkit.save(model, folder, save_format="sharded_state")


class TestByKey(TestCutAnew):
    def write_for_ranks(
        self, folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any], tp: int
    ) -> None:
        self.save(folder, weights, config, tp)
