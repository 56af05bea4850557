"""The GGUF architectures that loadkit knows: their model class, their config, their names.

The key is ``general.architecture``. A model of another architecture is loaded by naming its class
(``architecture="..."``) if that class has a ``gguf_mapper``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loadkit.mapper import WeightsMapper
from loadkit_gguf.names import (
    BERT_NAMES,
    DECODER_NAMES,
    GGUFMapper,
    TableMapper,
    minus_one,
    unpermute_keys,
    unpermute_queries,
    with_experts,
)

if TYPE_CHECKING:
    from loadkit_gguf.keys import Keys

__all__ = ["GGUF_ARCHITECTURES", "MIXTRAL", "Architecture", "find_architecture"]

_ROPE = "rope factors: they are read into the config"
_SKIPPED = {
    "rope_freqs": _ROPE,
    "rope_factors_long": _ROPE,
    "rope_factors_short": _ROPE,
    "attn_rot_embd": "rope angles: they follow from the config",
}
_TWO_NORMS = DECODER_NAMES | WeightsMapper(
    orig_to_new_substr={"ffn_norm": "post_attention_layernorm"}
)
_FOUR_NORMS = DECODER_NAMES | WeightsMapper(
    orig_to_new_substr={
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
)
_GEMMA_NORMS = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "pre_feedforward_layernorm.weight",
    "post_feedforward_layernorm.weight",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    "model.norm.weight",
)


@dataclass(frozen=True)
class Architecture:
    """How one GGUF architecture becomes a Hugging Face config and its tensors' names.

    Attributes:
        hf_class: the architecture's name as config.json has it.
        model_type: the same for ``model_type``.
        mapper: names and numbers, for a model class without ``gguf_mapper``.
        more: what its config has beside the common keys; may replace those.
    """

    hf_class: str
    model_type: str
    mapper: GGUFMapper
    more: Callable[[Keys], dict[str, Any]]


def _llama(keys: Keys) -> dict[str, Any]:
    more: dict[str, Any] = {
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in keys.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in keys.tensors,
    }
    window = keys.count("attention.sliding_window", None)
    if window:
        more |= {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": window,
        }
    return more


def _qwen2(keys: Keys) -> dict[str, Any]:
    return {"hidden_act": "silu", "use_sliding_window": False}


def _qwen3(keys: Keys) -> dict[str, Any]:
    return {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}


def _gemma3(keys: Keys) -> dict[str, Any]:
    layers, heads = keys.count("block_count"), keys.count("attention.head_count")
    size = keys.count("attention.key_length", 256)
    # Of the family's sizes only the one of 62 layers scales by another number than its heads' size.
    scale = keys.count("embedding_length") // max(heads or 1, 1) if layers == 62 else size
    more: dict[str, Any] = {
        "head_dim": size,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": scale,
        "sliding_window": keys.count("attention.sliding_window", 4096),
        "layer_types": keys.layer_kinds("attention.sliding_window_pattern", 6),
        "rope_theta": keys.real("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": keys.real("rope.freq_base_swa", 10_000.0),
    }
    for ours, theirs in (
        ("attn_logit_softcapping", "attn_logit_softcapping"),
        ("final_logit_softcapping", "final_logit_softcapping"),
    ):
        cap = keys.real(theirs, None)
        if cap:
            more[ours] = cap
    return more


def _mixtral(keys: Keys) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "num_local_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "sliding_window": keys.count("attention.sliding_window", None) or None,
    }


def _qwen3_moe(keys: Keys) -> dict[str, Any]:
    layers = keys.count("block_count")
    return {
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "num_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,  # as llama.cpp computes it: no key says so
        "mlp_only_layers": [
            layer
            for layer in range(min(layers, 1 << 16))
            if f"blk.{layer}.ffn_gate_inp.weight" not in keys.tensors
        ],
    }


def _bert(keys: Keys) -> dict[str, Any]:
    types = keys.tensors.get("token_types.weight")
    return {
        "hidden_act": "gelu",
        "layer_norm_eps": keys.real("attention.layer_norm_epsilon"),
        "type_vocab_size": types.shape[0] if types is not None and types.shape else None,
        "position_embedding_type": "absolute",
        "rope_theta": None,
        "tie_word_embeddings": None,
    }


_LLAMA_ORDER = {
    f"self_attn.{part}_proj.{kind}": change
    for part, change in (("q", unpermute_queries), ("k", unpermute_keys))
    for kind in ("weight", "bias")
}

_POOLER = dict.fromkeys(
    ("pooler.dense.weight", "pooler.dense.bias", "embeddings.position_ids"),
    "GGUF files of BERT hold no pooler and no positions: llama.cpp makes embeddings without them",
)

GGUF_ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        "LlamaForCausalLM", "llama", TableMapper(_TWO_NORMS, _SKIPPED, _LLAMA_ORDER), _llama
    ),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", TableMapper(_TWO_NORMS, _SKIPPED), _qwen2),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", TableMapper(_TWO_NORMS, _SKIPPED), _qwen3),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        TableMapper(
            _TWO_NORMS | with_experts("mlp", ("gate_proj", "up_proj", "down_proj")), _SKIPPED
        ),
        _qwen3_moe,
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        TableMapper(_FOUR_NORMS, _SKIPPED, dict.fromkeys(_GEMMA_NORMS, minus_one)),
        _gemma3,
    ),
    "bert": Architecture("BertModel", "bert", TableMapper(BERT_NAMES, unsaved=_POOLER), _bert),
}

# Files call it llama too; that it has experts tells it.
MIXTRAL = Architecture(
    "MixtralForCausalLM",
    "mixtral",
    TableMapper(
        _TWO_NORMS | with_experts("block_sparse_moe", ("w1", "w3", "w2")), _SKIPPED, _LLAMA_ORDER
    ),
    _mixtral,
)


def find_architecture(name: str, metadata: Mapping[str, Any]) -> Architecture | None:
    """What is known of a file's architecture; None: nothing."""
    if name == "llama" and metadata.get("llama.expert_count"):
        return MIXTRAL
    return GGUF_ARCHITECTURES.get(name)
