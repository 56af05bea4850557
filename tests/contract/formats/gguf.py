"""``gguf``: files that ``loadkit.save`` writes, in types that keep numbers and types that round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import loadkit
from contract.formats.base import MatrixFormat


class GGUF(MatrixFormat):
    load_format = "gguf"
    distribution = "loadkit-gguf"
    streamed = True
    remote_plan = True
    save = True

    def __init__(self, kind: str, **values: Any) -> None:
        super().__init__(name=f"gguf {kind}", save_options={"quantization": kind}, **values)

    def write(
        self, folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any], source: Path
    ) -> None:
        (folder / "config.json").unlink()  # the file alone says it
        quiet = loadkit.LoadConfig(use_tqdm_on_load=False)
        model = loadkit.load_model(source, dtype="bfloat16", load_config=quiet)
        loadkit.save(
            model,
            folder / "model.gguf",
            save_format="gguf",
            model_loader_extra_config=self.save_options,
        )


FORMATS = [
    GGUF("BF16", zero_copy=True),
    GGUF("F32"),
    # F16 has more digits than bfloat16; its smallest numbers have fewer.
    GGUF("F16", lossless=False, bound=2**-16),
    # Half a step of 1/127, its scale rounded to F16, and the product to bfloat16.
    GGUF("Q8_0", lossless=False, bound=0.01),
    GGUF("Q4_0", lossless=False, bound=0.14),
]
