"""bitsandbytes checkpoints keep the contract: in 4 bits, with nested scales, and in int8.

The contract's numbers are rounded to what the codes can say, so that quantising them again changes
nothing, and every comparison is exact.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("bitsandbytes")

from helpers.bitsandbytes_files import dequantised, pack, quantised
from helpers.packed_linear import numbers_of
from loadkit.testing import LoaderContract, write_checkpoint

Weights = dict[str, torch.Tensor]


class TestFourBit(LoaderContract):
    load_format = "bitsandbytes"
    architecture = "LlamaForCausalLM"  # whose layers hold weights packed
    follows_quantization = False  # it is one

    make = staticmethod(partial(pack, blocksize=32))  # what four ranks cut

    def weights(self, **sizes: Any) -> Weights:
        plain = super().weights(**sizes)
        return dequantised(quantised(plain, type(self).make))

    def write(self, folder: Path, weights: Weights, config: dict[str, Any]) -> None:
        stated = {"quant_method": "bitsandbytes", "load_in_4bit": True}
        tensors = {n: t.contiguous() for n, t in quantised(weights, type(self).make).items()}
        write_checkpoint(folder, tensors, {**config, "quantization_config": stated})

    def parameters(self, model: torch.nn.Module) -> Weights:
        return numbers_of(model)


@pytest.mark.slow
class TestFP4(TestFourBit):
    make = staticmethod(partial(pack, blocksize=32, quant_type="fp4"))
