"""Mixtral: Mistral's attention, and a mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from loadkit.config import HFConfig
from loadkit.mapper import WeightsMapper
from loadkit_layers.fused_moe import Router
from loadkit_models.attention_kinds import sliding_window
from loadkit_models.causal_lm import CausalLM
from loadkit_models.config_fields import count
from loadkit_models.decoder import DecoderSpec
from loadkit_models.mixture import MixtureSpec, mapper_of, num_experts

__all__ = ["MixtralForCausalLM"]


class MixtralForCausalLM(CausalLM):
    """A Mixtral with its head."""

    hf_to_loadkit_mapper: ClassVar[WeightsMapper] = mapper_of(
        CausalLM.hf_to_loadkit_mapper
    ) | WeightsMapper(orig_to_new_substr={"block_sparse_moe": "mlp"})
    config_defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    }

    @classmethod
    def describe(cls, hf_config: HFConfig, dtype: torch.dtype) -> DecoderSpec:
        spec = super().describe(hf_config, dtype)
        mixture = MixtureSpec(
            router=Router(
                num_experts=num_experts(hf_config, default=8),
                top_k=count(hf_config, "num_experts_per_tok"),
            ),
            inner=spec.sizes.ffn,
            disk_names=("w1", "w3", "w2"),
        )
        window = sliding_window(hf_config)
        return replace(
            spec,
            layers=tuple(replace(one, window=window, mixture=mixture) for one in spec.layers),
        )
