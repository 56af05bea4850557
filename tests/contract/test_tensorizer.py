"""Tensorizer files keep the contract: whole models, cut at a load or read by one rank each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import loadkit
from helpers.tensorizer_files import write_tensors
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.testing import LoaderContract, write_checkpoint

QUIET = LoadConfig(load_format="safetensors", use_tqdm_on_load=False)
KEY = bytes(range(32))


class TestTensorizer(LoaderContract):
    load_format = "tensorizer"

    def write(self, folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        write_tensors(folder / "model.tensors", weights)


class TestUnverified(TestTensorizer):
    extra_config = {"verify_hash": False}
    load_options = {"alias": "never", "reader": "pread"}


class TestEncrypted(TestTensorizer):
    has_catalogue = False
    damage_names = ("file", "hint")
    peak_slack = 384 << 20  # real data: the model twice, and the library's chunks (it held 347 MiB)

    def _keyed(self, folder: Path) -> None:
        type(self).extra_config = {"encryption_keyfile": str(folder / "key.json")}

    def write(self, folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        (folder / "key.json").write_bytes(KEY)
        self._keyed(folder)
        write_tensors(folder / "model.tensors", weights, KEY)


class TestRanks(LoaderContract):
    load_format = "tensorizer"
    free_form = False  # only a whole model is saved so
    extra_config = {"tensorizer_uri": "model-rank-%03d.tensors"}

    def write(self, folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        self.write_for_ranks(folder, weights, config, 1)

    def write_for_ranks(
        self, folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any], tp: int
    ) -> None:
        plain = write_checkpoint(folder.parent / f"{folder.name}-plain", weights, config)
        for rank in range(tp):
            parallel = ParallelConfig(tp_size=tp, tp_rank=rank)
            model = loadkit.load_model(
                plain, dtype=self.dtype, parallel=parallel, load_config=QUIET
            )
            loadkit.save(
                model,
                folder,
                save_format="tensorizer",
                model_loader_extra_config=dict(self.extra_config),
            )
