"""A tiny checkpoint of every model family, with numbers that differ from element to element."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import loadkit
from loadkit.config import LoadConfig

__all__ = ["FAMILIES", "write_family"]

_DECODER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,  # fewer than four ranks
    "vocab_size": 99,  # no multiple of anything
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "float32",
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}

# name -> config.json
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**_DECODER, "architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "llama_tied": {
        **_DECODER,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "tie_word_embeddings": True,
    },
    "mistral": {**_DECODER, "architectures": ["MistralForCausalLM"], "model_type": "mistral"},
    "qwen2": {**_DECODER, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {
        **_DECODER,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 8,
    },
    "gemma3": {
        **_DECODER,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": 10000.0,
        "rope_local_base_freq": 10000.0,
    },
    "bert": {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "vocab_size": 99,
        "max_position_embeddings": 64,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "torch_dtype": "float32",
    },
    "qwen3_moe": {
        **_DECODER,
        **_EXPERTS,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 8,
        "num_experts": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "mixtral": {
        **_DECODER,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}


def write_family(folder: Path, family: str, **changes: Any) -> Path:
    """Write a family's checkpoint in Hugging Face's names."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**FAMILIES[family], **changes}))
    quiet = LoadConfig(use_tqdm_on_load=False)
    model = loadkit.load_model(folder, load_format="dummy", load_config=quiet)
    loadkit.save(model, folder)
    return folder
