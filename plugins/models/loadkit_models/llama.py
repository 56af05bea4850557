"""Llama and the families that share its shape: SmolLM2, Mistral, and others that name it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from loadkit.config import HFConfig
from loadkit_models.attention_kinds import sliding_window
from loadkit_models.causal_lm import CausalLM
from loadkit_models.decoder import DecoderSpec

__all__ = ["LlamaForCausalLM", "MistralForCausalLM"]


class LlamaForCausalLM(CausalLM):
    """A Llama with its head."""


class MistralForCausalLM(CausalLM):
    """A Llama whose layers all see ``sliding_window`` tokens back, where the config has one."""

    config_defaults: ClassVar[Mapping[str, Any]] = {"sliding_window": 4096}

    @classmethod
    def describe(cls, hf_config: HFConfig, dtype: torch.dtype) -> DecoderSpec:
        spec = super().describe(hf_config, dtype)
        window = sliding_window(hf_config)
        return replace(spec, layers=tuple(replace(one, window=window) for one in spec.layers))
