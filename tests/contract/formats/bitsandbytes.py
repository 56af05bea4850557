"""``bitsandbytes``: 4-bit weights, here nf4, as bitsandbytes makes them of the same numbers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from contract.formats.base import MatrixFormat
from helpers.packed_linear import numbers_of
from loadkit.testing import write_checkpoint

STATED = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


class BitsAndBytes(MatrixFormat):
    load_format = "bitsandbytes"
    distribution = "loadkit-bitsandbytes"
    lossless = False
    # The widest gap between two codes of nf4 is 0.304 of a block's largest number, so half of that,
    # and the rounding to bfloat16.
    bound = 0.16
    zero_copy = True
    streamed = True
    remote_plan = True  # headers, and the states of quantised tensors, which are small ones
    save = True

    def write(
        self, folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any], source: Path
    ) -> None:
        from helpers.bitsandbytes_files import pack, quantised

        make = partial(pack, blocksize=32)  # a third of 288 columns is whole blocks
        tensors = {name: tensor.contiguous() for name, tensor in quantised(weights, make).items()}
        write_checkpoint(folder, tensors, {**config, "quantization_config": STATED})

    def parameters(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        return numbers_of(model)


FORMATS = [BitsAndBytes()]
