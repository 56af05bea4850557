"""Gemma 3, the text model: normed before and after, local layers between global ones.

# T tokens, D model width

Local layers see a window and count positions with a base of their own, never scaled. Norm weights
are stored minus one. In a multimodal checkpoint only the text model's tensors are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any, ClassVar

import torch

from loadkit.config import HFConfig, LoadkitConfig
from loadkit.errors import ConfigFileError
from loadkit.text import printable
from loadkit_layers.layernorm import GemmaRMSNorm
from loadkit_layers.rotary_embedding import RotaryEmbedding, get_rope, rope_parameters_of
from loadkit_layers.sequences import CuSeqlens
from loadkit_models.attention_kinds import SLIDING, attention_kinds, sliding_window
from loadkit_models.causal_lm import CausalLM
from loadkit_models.config_fields import count, flag, optional_real, real, text
from loadkit_models.decoder import DecoderLayer, DecoderSpec, LayerSpec

__all__ = ["Gemma3DecoderLayer", "Gemma3ForCausalLM"]


class Gemma3DecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normed before it and again before it is added."""

    def __init__(
        self, spec: DecoderSpec, layer: LayerSpec, *, config: LoadkitConfig, prefix: str
    ) -> None:
        super().__init__(spec, layer, config=config, prefix=prefix)
        self.pre_feedforward_layernorm = spec.norm(spec.sizes.hidden)
        self.post_feedforward_layernorm = spec.norm(spec.sizes.hidden)

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, *, cu_seqlens: CuSeqlens = None
    ) -> torch.Tensor:
        """``positions [T]`` and ``hidden [T, D]`` to ``[T, D]``."""
        normed = self.input_layernorm(hidden)
        attended = self.self_attn(positions, normed, cu_seqlens=cu_seqlens)
        hidden = hidden + self.post_attention_layernorm(attended)
        fed = self.mlp(self.pre_feedforward_layernorm(hidden))
        added: torch.Tensor = hidden + self.post_feedforward_layernorm(fed)
        return added


class Gemma3ForCausalLM(CausalLM):
    """A Gemma 3 text model with its head, which is the embedding unless the config says not."""

    # Published configs leave out most of it.
    config_defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    }
    # The other parts of a multimodal checkpoint.
    ignored_weights: ClassVar[tuple[str, ...]] = ("vision_tower.", "multi_modal_projector.")

    @classmethod
    def describe(cls, hf_config: HFConfig, dtype: torch.dtype) -> DecoderSpec:
        spec = super().describe(hf_config, dtype)
        sizes, causal = spec.sizes, not flag(hf_config, "use_bidirectional_attention")
        window = sliding_window(hf_config)
        if window is not None and not causal:
            window //= 2  # to either side
        pattern = count(hf_config, "sliding_window_pattern", 6)
        kinds = attention_kinds(hf_config, sizes.layers, lambda index: (index + 1) % pattern != 0)
        common = replace(
            spec.layers[0],
            scale=real(hf_config, "query_pre_attn_scalar", above=0) ** -0.5,
            causal=causal,
            soft_cap=optional_real(hf_config, "attn_logit_softcapping", above=0),
            qk_norm=True,
            mlp_bias=False,
            act=text(hf_config, "hidden_activation", "gelu_pytorch_tanh"),
        )
        ropes = {kind: cache(partial(_rope, hf_config, kind, sizes.head_size)) for kind in kinds}
        return replace(
            spec,
            layers=tuple(
                replace(
                    common,
                    rope=ropes[kind],
                    window=window if kind == SLIDING else None,
                )
                for kind in kinds
            ),
            norm=partial(GemmaRMSNorm, eps=real(hf_config, "rms_norm_eps", 1e-6), dtype=dtype),
            layer_class=Gemma3DecoderLayer,
            embed_scale=sizes.hidden**0.5,
            logit_soft_cap=optional_real(hf_config, "final_logit_softcapping", above=0),
        )


def _rope(hf_config: HFConfig, kind: str, head_size: int) -> RotaryEmbedding:
    """The rotary embedding of a kind of layer.

    The newer spelling is ``rope_parameters`` by kind; the older one is ``rope_local_base_freq`` for
    local layers, ``rope_theta`` and ``rope_scaling`` for global ones.

    Raises:
        ConfigFileError: E_CONFIG, settings that cannot be.
    """
    by_kind = getattr(hf_config, "rope_parameters", None)
    if by_kind is not None and not isinstance(by_kind, HFConfig):
        shown = printable(repr(by_kind), 80)
        raise ConfigFileError(f"config.json: rope_parameters is {shown}, not an object")
    own = None if by_kind is None else by_kind.get(kind)
    if kind == SLIDING:
        base = real(hf_config, "rope_local_base_freq", 10_000.0)
    else:
        base = real(hf_config, "rope_theta", 1_000_000.0)
        own = rope_parameters_of(hf_config, kind) if own is None else own
    longest = count(hf_config, "max_position_embeddings")
    return get_rope(head_size, max_position=longest, base=base, rope_parameters=own)
