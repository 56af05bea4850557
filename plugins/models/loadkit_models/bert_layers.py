"""The parts of BERT: embeddings, and layers normed after each addition.

# T tokens, D model width, F feed-forward width, R tp size

Module names are the checkpoint's, but that query, key and value are one ``qkv_proj``.
"""

from __future__ import annotations

import torch
from torch import nn

from loadkit.config import LoadkitConfig
from loadkit_layers.activation import get_act_fn
from loadkit_layers.attention import Attention
from loadkit_layers.layernorm import LayerNorm
from loadkit_layers.linear import ColumnParallelLinear, RowParallelLinear
from loadkit_layers.merged_linear import QKVParallelLinear
from loadkit_layers.sequences import CuSeqlens
from loadkit_layers.vocab_parallel_embedding import VocabParallelEmbedding
from loadkit_models.building import join, layer_options
from loadkit_models.config_fields import count, flag, real, text
from loadkit_models.sizes import DecoderSizes

__all__ = ["BertEmbeddings", "BertEncoder", "BertLayer"]


class BertEmbeddings(nn.Module):
    """Word, position and token type vectors, added and normed."""

    def __init__(self, *, config: LoadkitConfig, prefix: str = "") -> None:
        super().__init__()
        hf_config, dtype = config.model_config.hf_config, config.model_config.dtype
        sizes = DecoderSizes.of(hf_config)
        self.word_embeddings = VocabParallelEmbedding(
            sizes.vocab,
            sizes.hidden,
            padding_size=1,  # no head shares the table: unpadded, it can be a view of the file
            prefix=join(prefix, "word_embeddings"),
            **layer_options(config),
        )
        positions = count(hf_config, "max_position_embeddings", 512)
        self.position_embeddings = nn.Embedding(positions, sizes.hidden, dtype=dtype)
        types = count(hf_config, "type_vocab_size", 2)
        self.token_type_embeddings = nn.Embedding(types, sizes.hidden, dtype=dtype)
        self.LayerNorm = _norm(config)
        self.requires_grad_(False)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        token_type_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
    ) -> torch.Tensor:
        """Ids, positions and types ``[T]`` each to ``[T, D]``."""
        words = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(positions)
        added = words + self.token_type_embeddings(token_type_ids)
        normed: torch.Tensor = self.LayerNorm(added + self.position_embeddings(positions))
        return normed


class BertSelfAttention(nn.Module):
    """Attention over the whole text; query, key and value in one parameter."""

    def __init__(self, *, config: LoadkitConfig, prefix: str = "") -> None:
        super().__init__()
        hf_config = config.model_config.hf_config
        sizes = DecoderSizes.of(hf_config)
        self.qkv_proj = QKVParallelLinear(
            sizes.hidden,
            sizes.head_size,
            sizes.heads,
            return_bias=False,
            prefix=join(prefix, "qkv_proj"),
            **layer_options(config),
        )
        self.attn = Attention(
            self.qkv_proj.num_heads,
            sizes.head_size,
            sizes.head_size**-0.5,
            causal=flag(hf_config, "is_decoder"),
            prefix=join(prefix, "attn"),
        )

    def forward(self, hidden: torch.Tensor, *, cu_seqlens: CuSeqlens = None) -> torch.Tensor:
        """``[T, D]`` to this rank's heads ``[T, D/R]``."""
        qkv: torch.Tensor = self.qkv_proj(hidden)
        query, key, value = qkv.split(self.qkv_proj.output_partition_sizes, dim=-1)
        out: torch.Tensor = self.attn(query, key, value, cu_seqlens=cu_seqlens)
        return out


class BertOutput(nn.Module):
    """The second half of a sub-layer: project, add what came in, norm."""

    def __init__(self, input_size: int, *, config: LoadkitConfig, prefix: str = "") -> None:
        super().__init__()
        self.dense = RowParallelLinear(
            input_size,
            DecoderSizes.of(config.model_config.hf_config).hidden,
            return_bias=False,
            prefix=join(prefix, "dense"),
            **layer_options(config),
        )
        self.LayerNorm = _norm(config)

    def forward(self, inner: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """``inner`` cut over the ranks and ``residual [T, D]`` to ``[T, D]``."""
        normed: torch.Tensor = self.LayerNorm(self.dense(inner) + residual)
        return normed


class BertAttention(nn.Module):
    """Self-attention and its output."""

    def __init__(self, *, config: LoadkitConfig, prefix: str = "") -> None:
        super().__init__()
        hidden = DecoderSizes.of(config.model_config.hf_config).hidden
        self.self = BertSelfAttention(config=config, prefix=join(prefix, "self"))
        self.output = BertOutput(hidden, config=config, prefix=join(prefix, "output"))

    def forward(self, hidden: torch.Tensor, *, cu_seqlens: CuSeqlens = None) -> torch.Tensor:
        """``[T, D]`` to ``[T, D]``."""
        out: torch.Tensor = self.output(self.self(hidden, cu_seqlens=cu_seqlens), hidden)
        return out


class BertIntermediate(nn.Module):
    """The first half of the feed-forward part."""

    def __init__(self, *, config: LoadkitConfig, prefix: str = "") -> None:
        super().__init__()
        hf_config = config.model_config.hf_config
        sizes = DecoderSizes.of(hf_config)
        self.dense = ColumnParallelLinear(
            sizes.hidden,
            sizes.ffn,
            return_bias=False,
            prefix=join(prefix, "dense"),
            **layer_options(config),
        )
        self.act_fn = get_act_fn(text(hf_config, "hidden_act", "gelu"))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[T, D]`` to ``[T, F/R]``."""
        out: torch.Tensor = self.act_fn(self.dense(hidden))
        return out


class BertLayer(nn.Module):
    """Attention and feed-forward, each normed after it is added."""

    def __init__(self, *, config: LoadkitConfig, prefix: str = "") -> None:
        super().__init__()
        ffn = DecoderSizes.of(config.model_config.hf_config).ffn
        self.attention = BertAttention(config=config, prefix=join(prefix, "attention"))
        self.intermediate = BertIntermediate(config=config, prefix=join(prefix, "intermediate"))
        self.output = BertOutput(ffn, config=config, prefix=join(prefix, "output"))

    def forward(self, hidden: torch.Tensor, *, cu_seqlens: CuSeqlens = None) -> torch.Tensor:
        """``[T, D]`` to ``[T, D]``."""
        hidden = self.attention(hidden, cu_seqlens=cu_seqlens)
        out: torch.Tensor = self.output(self.intermediate(hidden), hidden)
        return out


class BertEncoder(nn.Module):
    """The layers, under the checkpoint's name for them."""

    def __init__(self, *, config: LoadkitConfig, prefix: str = "") -> None:
        super().__init__()
        self.layer = nn.ModuleList(
            BertLayer(config=config, prefix=join(prefix, f"layer.{index}"))
            for index in range(DecoderSizes.of(config.model_config.hf_config).layers)
        )

    def forward(self, hidden: torch.Tensor, *, cu_seqlens: CuSeqlens = None) -> torch.Tensor:
        """``[T, D]`` to ``[T, D]``."""
        for layer in self.layer:
            hidden = layer(hidden, cu_seqlens=cu_seqlens)
        return hidden


def _norm(config: LoadkitConfig) -> LayerNorm:
    """The family's norm."""
    hf_config = config.model_config.hf_config
    return LayerNorm(
        DecoderSizes.of(hf_config).hidden,
        eps=real(hf_config, "layer_norm_eps", 1e-12),
        dtype=config.model_config.dtype,
    )
