"""The small tensors that go with a quantised matrix in a checkpoint."""

from __future__ import annotations

import json

import torch

from loadkit_bitsandbytes.quant_state import QuantState
from loadkit_bitsandbytes.scheme import CODES

__all__ = ["state_tensor"]


def state_tensor(state: QuantState, code: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The code and the JSON of a matrix, by what is put after its weight's name.

    Args:
        state: how it is quantised.
        code: float32 [16]; None: the library's.
    """
    scheme = state.scheme
    values = {
        "quant_type": scheme.kind,
        "blocksize": scheme.blocksize,
        "dtype": scheme.dtype,
        "shape": list(state.shape),
    }
    if scheme.nested:
        values |= {
            "nested_blocksize": scheme.nested,
            "nested_dtype": "float32",
            "nested_offset": state.offset,
        }
    text = json.dumps(values).encode()
    if code is None:
        code = torch.tensor(CODES[scheme.kind], dtype=torch.float32)
    return {
        ".quant_map": code,
        f".quant_state.bitsandbytes__{scheme.kind}": torch.tensor(list(text), dtype=torch.uint8),
    }
