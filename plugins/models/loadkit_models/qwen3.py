"""Qwen3: Qwen2's windows, no biases unless asked for, and normed queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from loadkit.config import HFConfig
from loadkit_models.causal_lm import CausalLM
from loadkit_models.decoder import DecoderSpec
from loadkit_models.qwen2 import Qwen2ForCausalLM, layer_windows

__all__ = ["Qwen3ForCausalLM"]


class Qwen3ForCausalLM(CausalLM):
    """A Qwen3 (dense) with its head, its own or the embedding's."""

    config_defaults: ClassVar[Mapping[str, Any]] = {
        **Qwen2ForCausalLM.config_defaults,
        "head_dim": 128,  # whatever hidden_size and the heads are
    }

    @classmethod
    def describe(cls, hf_config: HFConfig, dtype: torch.dtype) -> DecoderSpec:
        spec = super().describe(hf_config, dtype)
        layers = tuple(
            replace(layer, qk_norm=True, mlp_bias=False, window=window)
            for layer, window in zip(spec.layers, layer_windows(hf_config, spec), strict=True)
        )
        return replace(spec, layers=layers)
