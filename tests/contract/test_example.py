"""The example plugin, tested as its author would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from loadkit.testing import LoaderContract

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}


class TestRawFolder(LoaderContract):
    load_format = "raw_folder"

    def write(self, folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        table = {}
        with (folder / "weights.raw").open("wb") as file:
            for name, tensor in weights.items():
                entry = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape)}
                table[name] = {**entry, "offset": file.tell()}
                file.write(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        (folder / "weights.json").write_text(json.dumps(table))
