"""Llama and the families that share its shape: SmolLM2, Mistral, and others that name it.

# T tokens, D model width, F feed-forward width, V vocabulary

Tensors on disk may have any of the usual prefixes, and q, k, v (gate, up) may be fused already;
``LlamaForCausalLM.hf_to_loadkit_mapper`` is the whole of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import nn

from loadkit.auto_weights_loader import AutoWeightsLoader
from loadkit.config import LoadkitConfig
from loadkit.errors import UsageError
from loadkit.interfaces import SupportsQuant, TextGenerationModel
from loadkit.mapper import WeightsMapper
from loadkit_layers.activation import get_act_and_mul_fn
from loadkit_layers.attention import Attention
from loadkit_layers.layernorm import RMSNorm
from loadkit_layers.linear import RowParallelLinear
from loadkit_layers.logits_processor import LogitsProcessor
from loadkit_layers.merged_linear import MergedColumnParallelLinear, QKVParallelLinear
from loadkit_layers.rotary_embedding import rope_from_config
from loadkit_layers.sequences import CuSeqlens
from loadkit_layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from loadkit_models.building import check_tp, join, layer_options, refuse_pipeline
from loadkit_models.config_fields import count, flag, real, text
from loadkit_models.sizes import DecoderSizes

__all__ = [
    "LlamaAttention",
    "LlamaDecoderLayer",
    "LlamaForCausalLM",
    "LlamaMLP",
    "LlamaModel",
    "MistralForCausalLM",
]


class LlamaMLP(nn.Module):
    """Gated feed-forward: ``down(act(gate(x)) * up(x))``, gate and up in one parameter."""

    def __init__(self, *, config: LoadkitConfig, prefix: str = "") -> None:
        super().__init__()
        hf_config = config.model_config.hf_text_config
        sizes, bias = DecoderSizes.of(hf_config), flag(hf_config, "mlp_bias")
        common = {**layer_options(config), "return_bias": False}
        self.gate_up_proj = MergedColumnParallelLinear(
            sizes.hidden, [sizes.ffn] * 2, bias, prefix=join(prefix, "gate_up_proj"), **common
        )
        self.down_proj = RowParallelLinear(
            sizes.ffn, sizes.hidden, bias, prefix=join(prefix, "down_proj"), **common
        )
        self.act_fn = get_act_and_mul_fn(text(hf_config, "hidden_act", "silu"))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[T, D]`` to ``[T, D]``."""
        gate_up = self.gate_up_proj(hidden)
        down: torch.Tensor = self.down_proj(self.act_fn(gate_up))
        return down


class LlamaAttention(nn.Module):
    """Grouped-query attention with rotary positions; q, k and v in one parameter."""

    def __init__(
        self, *, config: LoadkitConfig, prefix: str = "", sliding_window: int | None = None
    ) -> None:
        super().__init__()
        hf_config = config.model_config.hf_text_config
        sizes, bias = DecoderSizes.of(hf_config), flag(hf_config, "attention_bias")
        common = {**layer_options(config), "return_bias": False}
        self.qkv_proj = QKVParallelLinear(
            sizes.hidden,
            sizes.head_size,
            sizes.heads,
            sizes.kv_heads,
            bias,
            prefix=join(prefix, "qkv_proj"),
            **common,
        )
        self.o_proj = RowParallelLinear(
            sizes.heads * sizes.head_size,
            sizes.hidden,
            bias,
            prefix=join(prefix, "o_proj"),
            **common,
        )
        self.rotary_emb = rope_from_config(hf_config, head_size=sizes.head_size)
        self.attn = Attention(
            self.qkv_proj.num_heads,
            sizes.head_size,
            sizes.head_size**-0.5,
            self.qkv_proj.num_kv_heads,
            sliding_window=sliding_window,
            prefix=join(prefix, "attn"),
        )

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, *, cu_seqlens: CuSeqlens = None
    ) -> torch.Tensor:
        """``positions [T]`` and ``hidden [T, D]`` to ``[T, D]``."""
        qkv: torch.Tensor = self.qkv_proj(hidden)
        query, key, value = qkv.split(self.qkv_proj.output_partition_sizes, dim=-1)
        query, key = self.rotary_emb(positions, query, key)
        out: torch.Tensor = self.o_proj(self.attn(query, key, value, cu_seqlens=cu_seqlens))
        return out


class LlamaDecoderLayer(nn.Module):
    """Attention and feed-forward, each on the normed stream and added to it."""

    def __init__(
        self, *, config: LoadkitConfig, prefix: str = "", sliding_window: int | None = None
    ) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(
            config=config, prefix=join(prefix, "self_attn"), sliding_window=sliding_window
        )
        self.mlp = LlamaMLP(config=config, prefix=join(prefix, "mlp"))
        self.input_layernorm = _norm(config)
        self.post_attention_layernorm = _norm(config)

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, *, cu_seqlens: CuSeqlens = None
    ) -> torch.Tensor:
        """``positions [T]`` and ``hidden [T, D]`` to ``[T, D]``."""
        normed = self.input_layernorm(hidden)
        hidden = hidden + self.self_attn(positions, normed, cu_seqlens=cu_seqlens)
        added: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return added


class LlamaModel(nn.Module):
    """Embedding, decoder layers and the last norm."""

    def __init__(
        self, *, config: LoadkitConfig, prefix: str = "", sliding_window: int | None = None
    ) -> None:
        super().__init__()
        sizes = DecoderSizes.of(config.model_config.hf_text_config)
        self.embed_tokens = VocabParallelEmbedding(
            sizes.vocab, sizes.hidden, prefix=join(prefix, "embed_tokens"), **layer_options(config)
        )
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(
                config=config,
                prefix=join(prefix, f"layers.{index}"),
                sliding_window=sliding_window,
            )
            for index in range(sizes.layers)
        )
        self.norm = _norm(config)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
        *,
        cu_seqlens: CuSeqlens = None,
    ) -> torch.Tensor:
        """``input_ids [T]`` (or ``inputs_embeds [T, D]``) and ``positions [T]`` to ``[T, D]``."""
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            hidden = layer(positions, hidden, cu_seqlens=cu_seqlens)
        normed: torch.Tensor = self.norm(hidden)
        return normed


class LlamaForCausalLM(nn.Module, TextGenerationModel, SupportsQuant):
    """A Llama with its head.

    Raises:
        ConfigFileError: E_CONFIG, config.json lacks a size or has an impossible one.
        ModelError: ``TP_INDIVISIBLE``, naming the tp sizes that would do.
        UsageError: more than one pipeline stage.
    """

    # A fused parameter and the checkpoint's names of its parts.
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    hf_to_loadkit_mapper: ClassVar[WeightsMapper] = WeightsMapper(
        orig_to_new_prefix={
            "": "model.",  # saved from the model without its head
            "model.": "model.",
            "model.model.": "model.",  # wrapped once more
            "backbone.": "model.",
            "transformer.": "model.",
            "model.language_model.": "model.",  # the text part of a multimodal model
            "language_model.model.": "model.",
            "lm_head.": "lm_head.",
            "model.lm_head.": "lm_head.",
            "language_model.lm_head.": "lm_head.",
        },
        orig_to_new_stacked={
            "q_proj": ("qkv_proj", "q"),
            "k_proj": ("qkv_proj", "k"),
            "v_proj": ("qkv_proj", "v"),
            "gate_proj": ("gate_up_proj", 0),
            "up_proj": ("gate_up_proj", 1),
        },
    )
    uses_sliding_window: ClassVar[bool] = False

    def __init__(self, *, config: LoadkitConfig, prefix: str = "") -> None:
        super().__init__()
        hf_config = config.model_config.hf_text_config
        sizes = DecoderSizes.of(hf_config)
        refuse_pipeline(config.parallel_config, type(self).__name__)
        check_tp(
            config.parallel_config,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            widths=[sizes.ffn],
            prefix=prefix,
        )
        window = None
        if self.uses_sliding_window and getattr(hf_config, "sliding_window", None) is not None:
            window = count(hf_config, "sliding_window")
        self.model = LlamaModel(config=config, prefix=join(prefix, "model"), sliding_window=window)
        self.lm_head = ParallelLMHead(
            sizes.vocab, sizes.hidden, prefix=join(prefix, "lm_head"), **layer_options(config)
        )
        if config.model_config.tie_word_embeddings:
            self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(sizes.vocab)

    def get_input_embeddings(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``input_ids [T]`` to ``[T, D]``."""
        vectors: torch.Tensor = self.model.embed_tokens(input_ids)
        return vectors

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: torch.Tensor | None = None,
        *,
        cu_seqlens: CuSeqlens = None,
    ) -> torch.Tensor:
        """``input_ids [T]`` and ``positions [T]`` to hidden states ``[T, D]``."""
        if intermediate_tensors is not None:
            raise UsageError(f"{type(self).__name__} is no pipeline stage: it takes token ids")
        hidden: torch.Tensor = self.model(
            input_ids, positions, inputs_embeds, cu_seqlens=cu_seqlens
        )
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden [T, D]`` to ``[T, V]``, the same on every tp rank."""
        logits: torch.Tensor = self.logits_processor(self.lm_head, hidden)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Place checkpoint tensors; gives the names of the parameters that got any."""
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_loadkit_mapper)


class MistralForCausalLM(LlamaForCausalLM):
    """A Llama that sees ``sliding_window`` tokens back, where the config has one."""

    uses_sliding_window = True


def _norm(config: LoadkitConfig) -> RMSNorm:
    """The family's norm."""
    hf_config = config.model_config.hf_text_config
    return RMSNorm(
        DecoderSizes.of(hf_config).hidden,
        eps=real(hf_config, "rms_norm_eps", 1e-6),
        dtype=config.model_config.dtype,
    )
