"""What of a layer goes into a checkpoint, beside the codes themselves."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn

from loadkit_bitsandbytes.quant_state import QuantState
from loadkit_bitsandbytes.scheme import CODES

__all__ = ["rows_of", "state_tensor"]


def rows_of(layer: nn.Module, tensor: torch.Tensor, shard_id: Any) -> torch.Tensor:
    """The rows (or entries of a bias) of one shard of a layer at tp 1, or of all: a view."""
    shards = getattr(layer, "output_shards", ())
    if not shards:  # a head: its last rows may be padding
        return tensor.narrow(0, 0, int(getattr(layer, "num_embeddings", tensor.shape[0])))
    wanted = [shard for shard in shards if shard_id in (None, shard.id)]
    return tensor.narrow(0, wanted[0].offset, sum(shard.size for shard in wanted))


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
