"""Qwen3-MoE: Qwen3's attention, and a mixture of experts in most layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from loadkit.config import HFConfig
from loadkit.errors import ConfigFileError
from loadkit.mapper import WeightsMapper
from loadkit.text import printable
from loadkit_layers.fused_moe import Router
from loadkit_models.attention_kinds import sliding_window
from loadkit_models.causal_lm import CausalLM
from loadkit_models.config_fields import count, flag
from loadkit_models.decoder import DecoderSpec
from loadkit_models.mixture import MixtureSpec, mapper_of, num_experts

__all__ = ["Qwen3MoeForCausalLM"]


class Qwen3MoeForCausalLM(CausalLM):
    """A Qwen3-MoE with its head, its own or the embedding's."""

    hf_to_loadkit_mapper: ClassVar[WeightsMapper] = mapper_of(CausalLM.hf_to_loadkit_mapper)
    config_defaults: ClassVar[Mapping[str, Any]] = {
        "sliding_window": 4096,  # counts only where use_sliding_window is true
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
    }

    @classmethod
    def describe(cls, hf_config: HFConfig, dtype: torch.dtype) -> DecoderSpec:
        spec = super().describe(hf_config, dtype)
        mixture = MixtureSpec(
            router=Router(
                num_experts=num_experts(hf_config, default=128),
                top_k=count(hf_config, "num_experts_per_tok"),
                renormalize=flag(hf_config, "norm_topk_prob"),
            ),
            inner=count(hf_config, "moe_intermediate_size"),
        )
        window = sliding_window(hf_config) if flag(hf_config, "use_sliding_window") else None
        step, dense = count(hf_config, "decoder_sparse_step"), _dense_layers(hf_config)
        layers = tuple(
            replace(
                layer,
                qk_norm=True,
                mlp_bias=False,
                window=window,
                mixture=mixture if index not in dense and (index + 1) % step == 0 else None,
            )
            for index, layer in enumerate(spec.layers)
        )
        return replace(spec, layers=layers)


def _dense_layers(hf_config: HFConfig) -> frozenset[int]:
    """Which layers have one feed-forward part and no mixture, whatever their number.

    Raises:
        ConfigFileError: E_CONFIG, ``mlp_only_layers`` is no list of layer numbers.
    """
    named = getattr(hf_config, "mlp_only_layers", None) or []
    if not isinstance(named, list) or not all(type(index) is int for index in named):
        raise ConfigFileError(
            f"config.json: mlp_only_layers is {printable(repr(named), 80)}, no list of layer "
            "numbers"
        )
    return frozenset(named)
