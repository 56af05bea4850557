"""Checkpoints as Mistral publishes them, made from Hugging Face's by hand.

Written apart from the loader: names by their own table, rows by counting them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from helpers.checkpoints import write_st

__all__ = ["mistral_name", "params_of", "to_mistral", "write_mistral"]

_LAYER = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "block_sparse_moe.gate": "feed_forward.gate",
}
_OUTER = {"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output"}


def mistral_name(name: str) -> str:
    """Mistral's name of one of Hugging Face's tensors; one without a place there keeps its own."""
    module, _, kind = name.rpartition(".")
    if module in _OUTER:
        return f"{_OUTER[module]}.{kind}"
    _, _, layer, rest = module.split(".", 3)
    if rest.startswith("block_sparse_moe.experts."):
        return f"layers.{layer}.{rest.replace('block_sparse_moe', 'feed_forward')}.{kind}"
    return f"layers.{layer}.{_LAYER[rest]}.{kind}" if rest in _LAYER else name


def interleaved(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Row i of a head's first half, then row i of its second, for every i."""
    size = tensor.shape[0] // heads
    order = [
        head * size + half * (size // 2) + row
        for head in range(heads)
        for row in range(size // 2)
        for half in (0, 1)
    ]
    return tensor[order].contiguous()


def to_mistral(
    weights: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Hugging Face's tensors under Mistral's names, in Mistral's order."""
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        count = heads if ".q_proj." in name else kv_heads if ".k_proj." in name else None
        changed = tensor if count is None else interleaved(tensor, count)
        found[mistral_name(name)] = changed
    return found


def params_of(config: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """params.json of a Hugging Face config."""
    heads = config["num_attention_heads"]
    params: dict[str, Any] = {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "hidden_dim": config["intermediate_size"],
        "n_heads": heads,
        "n_kv_heads": config.get("num_key_value_heads", heads),
        "norm_eps": config.get("rms_norm_eps", 1e-5),
        "vocab_size": config["vocab_size"],
        "rope_theta": config.get("rope_theta", 10_000.0),
    }
    if config.get("sliding_window") is not None:
        params["sliding_window"] = config["sliding_window"]
    if config.get("tie_word_embeddings"):
        params["tied_embeddings"] = True
    if config.get("num_local_experts"):
        params["moe"] = {
            "num_experts": config["num_local_experts"],
            "num_experts_per_tok": config.get("num_experts_per_tok", 2),
        }
    return {**params, **changes}


def write_mistral(
    folder: Path,
    weights: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    *,
    shards: int = 1,
    index: bool = True,
    **params: Any,
) -> Path:
    """``consolidated*.safetensors`` and ``params.json`` in a folder; no config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "params.json").write_text(json.dumps(params_of(config, **params)))
    tensors = to_mistral(weights, config)
    if shards == 1:
        write_st(folder / "consolidated.safetensors", tensors)
        return folder
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        file = f"consolidated-{number + 1:05d}-of-{shards:05d}.safetensors"
        own = names[number::shards]
        write_st(folder / file, {name: tensors[name] for name in own})
        weight_map |= dict.fromkeys(own, file)
    if index:
        text = json.dumps({"metadata": {}, "weight_map": weight_map})
        (folder / "consolidated.safetensors.index.json").write_text(text)
    return folder
