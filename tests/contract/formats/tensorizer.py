"""``tensorizer``: a whole model's file, verified by its own hashes or read without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from contract.formats.base import MatrixFormat


class Tensorizer(MatrixFormat):
    load_format = "tensorizer"
    distribution = "loadkit-tensorizer"
    verified = "own hashes, digest"
    tp_slices = False  # a tensor of which any part is used is read whole, to verify it
    zero_copy = True
    streamed = True
    remote_plan = True
    save = True

    def write(
        self, folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any], source: Path
    ) -> None:
        from tensorizer import TensorSerializer

        writer = TensorSerializer(folder / "model.tensors")
        writer.write_state_dict(weights)
        writer.close()


class Unverified(Tensorizer):
    name = "tensorizer (verify_hash=false)"
    verified = "digest"
    tp_slices = True
    extra_config = {"verify_hash": False}


FORMATS = [Tensorizer(), Unverified()]
