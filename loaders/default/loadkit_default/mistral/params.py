"""params.json as the config that Hugging Face writes for the same model.

Source: the arguments of ``mistral-inference``, and the files that Mistral publishes. What that code
fills in is filled in here: no ``n_kv_heads`` is as many as ``n_heads``, no ``head_dim`` is
``dim / n_heads``, no ``rope_theta`` is 1e6 (1e4 with a sliding window), and no length is 128,000.

A setting that changes what is computed, and that no model here has, is refused. One that nobody
here knows is a note of the plan and a warning of the load.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from loadkit.errors import ConfigFileError
from loadkit.file_checks import show
from loadkit.hf_config import CONFIG_LIMITS, bad_value

__all__ = ["PARAMS", "config_of", "unknown_keys"]

PARAMS = "params.json"
_LONGEST = 128_000  # tokens that Mistral's own code has positions for
_REQUIRED = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "vocab_size": "vocab_size",
}
_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta": "beta_fast",
    "alpha": "beta_slow",
}
_KNOWN = frozenset(
    {
        *_REQUIRED,
        *("n_kv_heads", "head_dim", "norm_eps", "rope_theta", "sliding_window", "activation"),
        *("max_seq_len", "max_position_embeddings", "tied_embeddings", "dtype", "model_type"),
        *("moe", "yarn"),
        "max_batch_size",  # of Mistral's own cache
    }
)
_KNOWN_MOE = frozenset({"num_experts", "num_experts_per_tok"})
_KNOWN_YARN = frozenset({*_YARN, "apply_scale"})
# What no model here computes -> what it is. Null, false, 0 and {} are not asking for it.
_REFUSED = {
    "quantization": "a quantised checkpoint",
    "vision_encoder": "a model that sees images",
    "multimodal": "a model that sees images or hears",
    "lora": "an adapter",
    "llama_4_scaling": "queries scaled by position",
    "ada_rms_norm_t_cond": "norms that depend on time",
    "q_lora_rank": "latent attention",
    "kv_lora_rank": "latent attention",
    "qk_nope_head_dim": "latent attention",
    "qk_rope_head_dim": "latent attention",
    "moe.num_shared_experts": "experts that all tokens share",
    "moe.first_k_dense_replace": "layers without experts among layers with them",
    "moe.expert_hidden_dim": "experts of another width than hidden_dim",
    "moe.num_expert_groups": "groups of experts",
    "moe.routed_scale": "scaled routing weights",
}
_NEUTRAL = {"moe.num_expert_groups": 1, "moe.routed_scale": 1, "moe.route_every_n": 1}


def config_of(params: Mapping[str, Any], *, file: str = PARAMS) -> dict[str, Any]:
    """The config, in Hugging Face's words.

    Raises:
        ConfigFileError: E_CONFIG, keys are missing (all are named), a value cannot be, or the file
            asks for something that no model here computes.
    """
    _refuse(params, file)
    missing = [key for key in _REQUIRED if params.get(key) is None]
    if missing:
        raise ConfigFileError(
            f"{show(file)} lacks {', '.join(map(show, missing))}, which a model needs",
            file=file,
            detail={"missing": missing},
            hint="it has to be the file that Mistral's checkpoints bring",
        )
    config: dict[str, Any] = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    config |= {hf: _count(params, key, hf, file) for key, hf in _REQUIRED.items()}
    heads = config["num_attention_heads"]
    kv_heads = _count(params, "n_kv_heads", "num_key_value_heads", file)
    config["num_key_value_heads"] = heads if kv_heads is None else kv_heads
    head_dim = _count(params, "head_dim", "head_dim", file)
    config["head_dim"] = head_dim or max(1, config["hidden_size"] // max(1, heads))
    eps = _number(params, "norm_eps", file)
    config["rms_norm_eps"] = 1e-5 if eps is None else eps
    window = _window(params.get("sliding_window"), config["num_hidden_layers"], file)
    config["sliding_window"] = window
    theta = _number(params, "rope_theta", file)
    config["rope_theta"] = theta if theta is not None else 1e6 if window is None else 1e4
    longest = _count(params, "max_position_embeddings", "max_position_embeddings", file)
    longest = longest or _count(params, "max_seq_len", "max_position_embeddings", file)
    config["max_position_embeddings"] = longest or _LONGEST
    config["hidden_act"] = _of_type(params, "activation", str, "a name", file) or "silu"
    tied = _of_type(params, "tied_embeddings", bool, "true or false", file)
    config["tie_word_embeddings"] = bool(tied)
    dtype = _of_type(params, "dtype", str, "the name of a dtype", file)
    if dtype is not None:
        config["torch_dtype"] = dtype
    if params.get("yarn"):
        config["rope_scaling"] = _yarn(params["yarn"], file)
    if params.get("moe"):
        config |= _moe(params["moe"], file)
    return config


def unknown_keys(params: Mapping[str, Any]) -> list[str]:
    """Keys that nothing here follows, by dotted names; null is not there."""
    found: list[str] = []
    for prefix, known in (("", _KNOWN), ("moe.", _KNOWN_MOE), ("yarn.", _KNOWN_YARN)):
        node = params.get(prefix[:-1]) if prefix else params
        for key, value in node.items() if isinstance(node, Mapping) else ():
            name = f"{prefix}{key}"
            settled = name in _REFUSED or value == _NEUTRAL.get(name, object())
            if key not in known and value is not None and not settled:
                found.append(name)
    return found


def _refuse(params: Mapping[str, Any], file: str) -> None:
    kind = params.get("model_type")
    if kind not in (None, "transformer"):
        raise bad_value("model_type", kind, "'transformer'", file=file)
    for name, what in _REFUSED.items():
        outer, _, inner = name.rpartition(".")
        node = params.get(outer) if outer else params
        value = node.get(inner) if isinstance(node, Mapping) else None
        if value and value != _NEUTRAL.get(name):
            raise ConfigFileError(
                f"{show(file)} has {show(name)}: {what}, which load format 'mistral' does not read",
                file=file,
                detail={"key": name},
                hint="use the checkpoint in Hugging Face's layout, where there is one",
            )


def _count(params: Mapping[str, Any], key: str, hf_key: str, file: str) -> Any:
    """A whole number within what a config may have; None where it is absent."""
    value = params.get(key)
    low, high = CONFIG_LIMITS[hf_key]
    low = max(low, 1)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise bad_value(key, value, f"an integer from {low} to {high}", file=file)
    return value


def _number(params: Mapping[str, Any], key: str, file: str) -> Any:
    """A finite number of at least 0; None where it is absent."""
    value = params.get(key)
    if value is None:
        return None
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value <= sys.float_info.max:
        raise bad_value(key, value, "a finite number of at least 0", file=file)
    return value


def _of_type(params: Mapping[str, Any], key: str, kind: type, accepted: str, file: str) -> Any:
    """A value of one type; None where it is absent."""
    value = params.get(key)
    if value is not None and not isinstance(value, kind):
        raise bad_value(key, value, accepted, file=file)
    return value


def _window(value: Any, layers: int, file: str) -> int | None:
    """The one window of all layers: a number, its text, or a list that says the same throughout."""
    if isinstance(value, list):
        if not value or layers % len(value):
            _bad_window(value, f"a list whose length divides {layers} layers", file)
        if any(each != value[0] for each in value):
            _bad_window(value, "one window for all layers", file)
        value = value[0]
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}", value):
        value = int(value)  # some published files quote it
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 31:
        _bad_window(value, "a number of tokens", file)
    return int(value)


def _bad_window(value: Any, accepted: str, file: str) -> NoReturn:
    raise bad_value("sliding_window", value, accepted, file=file)


def _yarn(stated: Any, file: str) -> dict[str, Any]:
    if not isinstance(stated, Mapping):
        raise bad_value("yarn", stated, "an object", file=file)
    lacking = [key for key in _YARN if stated.get(key) is None]
    if lacking:
        raise bad_value("yarn", dict(stated), f"an object with {', '.join(_YARN)}", file=file)
    settings = {"rope_type": "yarn", **{hf: stated[key] for key, hf in _YARN.items()}}
    if _of_type(stated, "apply_scale", bool, "true or false", file) is False:
        settings["attention_factor"] = 1.0  # attention is not made warmer
    return settings


def _moe(stated: Any, file: str) -> dict[str, Any]:
    if not isinstance(stated, Mapping):
        raise bad_value("moe", stated, "an object", file=file)
    names = {"num_experts": "num_local_experts", "num_experts_per_tok": "num_experts_per_tok"}
    counts = {hf: _count(stated, key, hf, file) for key, hf in names.items()}
    lacking = [key for key, hf in names.items() if counts[hf] is None]
    every = stated.get("route_every_n")
    if lacking or every not in (None, 1):
        accepted = "an object with num_experts and num_experts_per_tok, and experts in every layer"
        raise bad_value("moe", dict(stated), accepted, file=file)
    return {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", **counts}
