"""What a GGUF file's tensors are in Hugging Face's names and numbers, by gguf-py's decoder.

A second, slow way to the same weights. H heads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from helpers.gguf_metadata import read_metadata
from loadkit.sources.local_file import LocalFile
from loadkit_gguf.header import read_gguf_header

__all__ = ["hf_name", "reference", "shard"]

_PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
_GEMMA = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def reference(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor in float32."""
    keys = read_metadata(path)
    architecture = keys["general.architecture"]
    file = LocalFile(path.name, str(path))
    found: dict[str, torch.Tensor] = {}
    for tensor in read_gguf_header(file).tensors:
        raw = np.frombuffer(file.read(tensor.offset, tensor.nbytes), np.uint8)
        if tensor.dtype == "F32":
            values = raw.view(np.float32).reshape(tensor.shape)
        else:
            rows = raw.reshape(*tensor.shape[:-1], -1)
            values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[tensor.dtype])
        name = hf_name(tensor.name, architecture)
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = keys[f"llama.attention.head_count{'_kv' if 'k_proj' in name else ''}"]
            pairs = values.reshape(heads, len(values) // heads // 2, 2, *values.shape[1:])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        if architecture == "gemma3" and "norm" in name:
            values = values - np.float32(1)
        found[name] = torch.from_numpy(np.array(values))
    file.close()
    return found


def hf_name(name: str, architecture: str) -> str:
    """A tensor's Hugging Face name."""
    first, *rest = name.split(".")
    if first == "blk":
        layer, own, kind = rest
        table = {**_LAYER, **(_GEMMA if architecture == "gemma3" else {})}
        return f"model.layers.{layer}.{table[own]}.{kind}"
    table = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    return ".".join([table[first], *rest])


def shard(
    weights: dict[str, torch.Tensor], parameter: str, config: Any, rank: int, size: int
) -> torch.Tensor:
    """What rank ``rank`` of ``size`` holds of a parameter: fused, cut, padding zeroed."""
    module = parameter.split(".")[-2]
    if module in _PARTS:
        heads = {"k_proj": config.num_key_value_heads, "v_proj": config.num_key_value_heads}
        return torch.cat(
            [
                _rows(weights[parameter.replace(module, part)], rank, size, heads.get(part))
                for part in _PARTS[module]
            ]
        )
    whole = weights[parameter]
    if module in ("o_proj", "down_proj") and parameter.endswith("weight"):
        width = whole.shape[1] // size
        return whole[:, rank * width : (rank + 1) * width]
    if module in ("embed_tokens", "lm_head"):
        padded = -(-whole.shape[0] // (64 * size)) * 64 * size
        full = torch.zeros(padded, whole.shape[1])
        full[: whole.shape[0]] = whole
        return full.chunk(size)[rank]
    return whole


def _rows(whole: torch.Tensor, rank: int, size: int, heads: int | None) -> torch.Tensor:
    if heads is not None and heads < size:  # kv heads are repeated over ranks
        return whole.chunk(heads)[rank * heads // size]
    return whole.chunk(size)[rank]
