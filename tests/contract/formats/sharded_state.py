"""``sharded_state``: what ranks hold, cut anew where the topology is another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import loadkit
from contract.formats.base import MatrixFormat


class ShardedState(MatrixFormat):
    load_format = "sharded_state"
    distribution = "loadkit-sharded-state"
    zero_copy = True
    streamed = True
    remote_plan = True
    save = True

    def write(
        self, folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any], source: Path
    ) -> None:
        model = loadkit.load_model(source, load_config=loadkit.LoadConfig(use_tqdm_on_load=False))
        loadkit.save(model, folder, save_format="sharded_state")


FORMATS = [ShardedState()]
