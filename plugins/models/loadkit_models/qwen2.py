"""Qwen2 and Qwen2.5: a Llama with biases on q, k, v, and windows from some layer on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from loadkit.config import HFConfig
from loadkit_models.attention_kinds import SLIDING, attention_kinds, sliding_window
from loadkit_models.causal_lm import CausalLM
from loadkit_models.config_fields import count, flag
from loadkit_models.decoder import DecoderSpec

__all__ = ["Qwen2ForCausalLM", "layer_windows"]


class Qwen2ForCausalLM(CausalLM):
    """A Qwen2 with its head, its own or the embedding's."""

    config_defaults: ClassVar[Mapping[str, Any]] = {
        "sliding_window": 4096,  # counts only where use_sliding_window is true
        "max_window_layers": 28,
    }

    @classmethod
    def describe(cls, hf_config: HFConfig, dtype: torch.dtype) -> DecoderSpec:
        spec = super().describe(hf_config, dtype)
        layers = tuple(
            replace(layer, qkv_bias=True, o_bias=False, mlp_bias=False, window=window)
            for layer, window in zip(spec.layers, layer_windows(hf_config, spec), strict=True)
        )
        return replace(spec, layers=layers)


def layer_windows(hf_config: HFConfig, spec: DecoderSpec) -> list[int | None]:
    """Each layer's window. Without ``use_sliding_window`` there is none, whatever else is said."""
    window = sliding_window(hf_config) if flag(hf_config, "use_sliding_window") else None
    first = count(hf_config, "max_window_layers", least=0)
    kinds = attention_kinds(hf_config, spec.sizes.layers, lambda index: index >= first)
    return [window if kind == SLIDING else None for kind in kinds]
