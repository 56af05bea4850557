"""The keys of a GGUF header from a config as Hugging Face writes it: ``config.py`` run backwards.

Source: the keys of the GGUF specification, and what ``convert_hf_to_gguf.py`` writes into them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from loadkit.config import HFConfig
from loadkit.errors import ModelError
from loadkit.text import printable
from loadkit_gguf.config import LLAMA3, stretch
from loadkit_layers.rotary_embedding import rope_parameters_of

__all__ = ["config_keys", "rope_factors"]

# ours -> theirs; written where the config has a value
_COUNTS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "vocab_size": "vocab_size",
    "moe_intermediate_size": "expert_feed_forward_length",
    "num_experts_per_tok": "expert_used_count",
}
_REALS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope_local_base_freq": "rope.freq_base_swa",
}


def config_keys(architecture: str, config: HFConfig) -> dict[str, Any]:
    """``ARCHITECTURE.*`` for a text model's config.

    Raises:
        ModelError: GGUF_CONFIG, the config says something that there is no key for.
    """
    found: dict[str, Any] = {}
    for ours, theirs in _COUNTS.items():
        if _given(config, ours) is not None:
            found[theirs] = int(config[ours])
    experts = _given(config, "num_experts") or _given(config, "num_local_experts")
    if experts is not None:
        found["expert_count"] = int(experts)
    if architecture == "bert":
        found |= {
            "attention.layer_norm_epsilon": float(_given(config, "layer_norm_eps") or 1e-12),
            "attention.causal": False,
            "pooling_type": 1,  # the mean
        }
    else:
        found |= _decoder(architecture, config)
    for ours, theirs in _REALS.items():
        if _given(config, ours) is not None:
            found[theirs] = float(config[ours])
    return {f"{architecture}.{name}": value for name, value in found.items()}


def _decoder(architecture: str, config: HFConfig) -> dict[str, Any]:
    heads = int(config["num_attention_heads"])
    size = _given(config, "head_dim")
    found: dict[str, Any] = {
        "attention.head_count_kv": int(_given(config, "num_key_value_heads") or heads),
        "attention.layer_norm_rms_epsilon": float(_given(config, "rms_norm_eps") or 1e-6),
    }
    if size is not None:
        found |= {"attention.key_length": int(size), "attention.value_length": int(size)}
    if _slides(architecture, config):
        found["attention.sliding_window"] = int(config["sliding_window"])
    kinds = _given(config, "layer_types")
    if architecture == "gemma3" and kinds is not None:
        found["attention.sliding_window_pattern"] = _pattern(kinds)
    return found | _rope(config, int(size or config["hidden_size"] // heads))


def _slides(architecture: str, config: HFConfig) -> bool:
    """Whether there is a window to state.

    Raises:
        ModelError: GGUF_CONFIG, there is one, and no key for this architecture's.
    """
    window = _given(config, "sliding_window")
    if architecture in ("llama", "gemma3"):
        return bool(window)
    if window and _given(config, "use_sliding_window"):
        raise _unsayable(architecture, "use_sliding_window", True)
    return False


def _pattern(kinds: Sequence[str]) -> Any:
    """Every n-th layer is full: n. Else which layers slide."""
    full = [index + 1 for index, kind in enumerate(kinds) if kind == "full_attention"]
    every = full[0] if full else len(kinds) + 1
    if full == list(range(every, len(kinds) + 1, every)):
        return every
    return np.array([kind != "full_attention" for kind in kinds], dtype=np.bool_)


def _settings(config: HFConfig) -> dict[str, Any]:
    """Rope settings from either spelling; those of the full layers where kinds differ."""
    settings = rope_parameters_of(config, "full_attention")
    settings.setdefault("rope_type", settings.get("type", "default"))
    return settings


def _rope(config: HFConfig, size: int) -> dict[str, Any]:
    settings = _settings(config)
    kind = settings["rope_type"]
    found: dict[str, Any] = {}
    if settings.get("rope_theta") is not None:
        found["rope.freq_base"] = float(settings["rope_theta"])
    partial = settings.get("partial_rotary_factor")
    found["rope.dimension_count"] = int(size * (1.0 if partial is None else partial))
    if kind in ("default", "llama3"):
        if kind == "llama3" and any(settings.get(name) != value for name, value in LLAMA3.items()):
            raise _unsayable("llama", "rope_scaling", settings)
        return found
    if kind not in ("linear", "yarn"):
        raise _unsayable("this", "rope_type", kind)
    found |= {"rope.scaling.type": kind, "rope.scaling.factor": float(settings["factor"])}
    if kind == "yarn":
        original = settings.get("original_max_position_embeddings")
        if original is not None:
            found["rope.scaling.original_context_length"] = int(original)
        for name in ("beta_fast", "beta_slow"):
            if settings.get(name) is not None:
                found[f"rope.scaling.yarn_{name}"] = float(settings[name])
    return found


def rope_factors(config: HFConfig) -> np.ndarray | None:
    """float32 factors of Llama 3's rotation, one for each pair of numbers; None for others."""
    settings = _settings(config)
    if settings["rope_type"] != "llama3":
        return None
    size = _given(config, "head_dim") or config["hidden_size"] // config["num_attention_heads"]
    turned = int(size * (settings.get("partial_rotary_factor") or 1.0))
    theta = float(settings.get("rope_theta") or 10_000.0)
    waves = [2 * math.pi * theta ** (2 * index / turned) for index in range(turned // 2)]
    return np.array([stretch(wave, settings) for wave in waves], dtype=np.float32)


def _given(config: Mapping[str, Any] | HFConfig, name: str) -> Any:
    return config.get(name)


def _unsayable(architecture: str, name: str, value: Any) -> ModelError:
    return ModelError(
        f"config.json says {name} = {printable(repr(value), 120)}, and a GGUF file of the "
        f"architecture {architecture!r} has no key for that",
        code="GGUF_CONFIG",
        detail={"key": name},
        hint="save_format='safetensors' keeps every setting",
    )
