"""Parallel layers whose parameters load themselves. Importing the package leaves torch alone."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULES = {
    "activation": ("GeluAndMul", "SiluAndMul", "get_act_and_mul_fn", "get_act_fn"),
    "attention": ("Attention",),
    "block_scale": ("BlockQuantScaleParameter",),
    "communication": ("all_gather", "all_reduce", "init_parallel_groups", "tp_group"),
    "custom_op": ("CustomOp",),
    "fused_moe": (
        "ExpertParameter",
        "FusedMoE",
        "Router",
        "UnquantizedFusedMoEMethod",
        "run_experts",
    ),
    "kv_cache": ("KVCache",),
    "layernorm": ("GemmaRMSNorm", "LayerNorm", "RMSNorm"),
    "linear": ("ColumnParallelLinear", "LinearBase", "ReplicatedLinear", "RowParallelLinear"),
    "logits_processor": ("LogitsProcessor",),
    "merged_linear": ("MergedColumnParallelLinear", "QKVParallelLinear"),
    "parameter": (
        "BaseParameter",
        "ChannelQuantScaleParameter",
        "ColumnParameter",
        "GroupQuantScaleParameter",
        "ModelWeightParameter",
        "PackedParameter",
        "PerTensorScaleParameter",
        "RowParameter",
    ),
    "pipeline": (
        "IntermediateTensors",
        "PPMissingLayer",
        "get_pp_indices",
        "is_pp_missing_parameter",
        "make_layers",
    ),
    "pooler": ("Pooler", "PoolingType"),
    "rotary_embedding": (
        "DynamicNTKScalingRotaryEmbedding",
        "LinearScalingRotaryEmbedding",
        "Llama3RotaryEmbedding",
        "RotaryEmbedding",
        "YaRNScalingRotaryEmbedding",
        "get_rope",
    ),
    "sharding": ("Shard", "require_divisible"),
    "unquantized": ("UnquantizedLinearMethod",),
    "vocab_parallel_embedding": ("ParallelLMHead", "VocabParallelEmbedding", "pad_vocab_size"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Import what is asked for, once."""
    if name not in _HOME:
        raise AttributeError(f"module 'loadkit_layers' has no attribute {name!r}")
    value = getattr(import_module(f"loadkit_layers.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
