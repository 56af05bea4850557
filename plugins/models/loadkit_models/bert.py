"""BERT as an encoder: one vector per token, pooled to one per text where asked.

# T tokens, B texts, D model width, F feed-forward width, V vocabulary, R tp size

Module names are the checkpoint's, but that query, key and value are one ``qkv_proj``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from loadkit.auto_weights_loader import AutoWeightsLoader
from loadkit.config import LoadkitConfig
from loadkit.errors import ConfigFileError, UsageError
from loadkit.mapper import WeightsMapper
from loadkit_layers.activation import get_act_fn
from loadkit_layers.attention import Attention
from loadkit_layers.layernorm import LayerNorm
from loadkit_layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from loadkit_layers.merged_linear import QKVParallelLinear
from loadkit_layers.pooler import Pooler
from loadkit_layers.sequences import sequence_spans
from loadkit_layers.vocab_parallel_embedding import VocabParallelEmbedding
from loadkit_models.building import check_tp, join, layer_options, refuse_pipeline
from loadkit_models.config_fields import count, flag, real, text
from loadkit_models.sentence_transformers import read_pooling
from loadkit_models.sizes import DecoderSizes

__all__ = ["BertLayer", "BertModel"]

CuSeqlens = torch.Tensor | Sequence[int] | None


class BertEmbeddings(nn.Module):
    """Word, position and token type vectors, added and normed."""

    def __init__(self, *, config: LoadkitConfig, prefix: str = "") -> None:
        super().__init__()
        hf_config, dtype = config.model_config.hf_config, config.model_config.dtype
        sizes = DecoderSizes.of(hf_config)
        self.word_embeddings = VocabParallelEmbedding(
            sizes.vocab,
            sizes.hidden,
            prefix=join(prefix, "word_embeddings"),
            **layer_options(config),
        )
        positions = count(hf_config, "max_position_embeddings", 512)
        self.position_embeddings = nn.Embedding(positions, sizes.hidden, dtype=dtype)
        types = count(hf_config, "type_vocab_size", 2)
        self.token_type_embeddings = nn.Embedding(types, sizes.hidden, dtype=dtype)
        self.LayerNorm = _norm(config)

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


class BertPooler(nn.Module):
    """The first token's vector through a dense layer and tanh, as next-sentence training had it."""

    def __init__(self, *, config: LoadkitConfig, prefix: str = "") -> None:
        super().__init__()
        hidden = DecoderSizes.of(config.model_config.hf_config).hidden
        self.dense = ReplicatedLinear(
            hidden,
            hidden,
            return_bias=False,
            prefix=join(prefix, "dense"),
            **layer_options(config),
        )

    def forward(self, first: torch.Tensor) -> torch.Tensor:
        """``[B, D]`` to ``[B, D]``."""
        return torch.tanh(self.dense(first))


class BertModel(nn.Module):
    """The encoder.

    ``forward`` gives a vector per token. ``pool`` gives one per text, as the sentence-transformers
    folder says (without one: the mean). ``pooler_output`` is BERT's own summary; checkpoints that
    leave its weights out load as well, and then there is no ``pooler``.

    Raises:
        ConfigFileError: E_CONFIG, config.json lacks a size or has an impossible one, or asks for
            relative positions.
        ModelError: ``TP_INDIVISIBLE``, naming the tp sizes that would do.
        UsageError: more than one pipeline stage.
    """

    is_pooling_model: ClassVar[bool] = True
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {"qkv_proj": ["query", "key", "value"]}
    hf_to_loadkit_mapper: ClassVar[WeightsMapper] = WeightsMapper(
        orig_to_new_prefix={"bert.": ""},
        orig_to_new_suffix={".gamma": ".weight", ".beta": ".bias"},  # as TensorFlow named them
        orig_to_new_stacked={
            "query": ("qkv_proj", "q"),
            "key": ("qkv_proj", "k"),
            "value": ("qkv_proj", "v"),
        },
    )
    # The heads of pre-training; the encoder has none.
    ignored_weights: ClassVar[tuple[str, ...]] = ("cls.",)

    def __init__(self, *, config: LoadkitConfig, prefix: str = "") -> None:
        super().__init__()
        hf_config = config.model_config.hf_config
        sizes = DecoderSizes.of(hf_config)
        refuse_pipeline(config.parallel_config, type(self).__name__)
        check_tp(
            config.parallel_config,
            heads=sizes.heads,
            kv_heads=sizes.heads,
            widths=[sizes.ffn],
            prefix=prefix,
        )
        positions = text(hf_config, "position_embedding_type", "absolute")
        if positions != "absolute":
            raise ConfigFileError(
                f"config.json: position_embedding_type is {positions!r}; there is 'absolute'"
            )
        self.embeddings = BertEmbeddings(config=config, prefix=join(prefix, "embeddings"))
        self.encoder = BertEncoder(config=config, prefix=join(prefix, "encoder"))
        self.pooler: BertPooler | None = BertPooler(config=config, prefix=join(prefix, "pooler"))
        self._pooling = read_pooling(config.model_config.source, config.load_config)
        self.pooling = Pooler(self._pooling.kind, self._pooling.normalize)

    def get_input_embeddings(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``input_ids [T]`` to word vectors ``[T, D]``."""
        vectors: torch.Tensor = self.embeddings.word_embeddings(input_ids)
        return vectors

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: torch.Tensor | None = None,
        *,
        cu_seqlens: CuSeqlens = None,
        token_type_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Ids, positions within their text, and types (default 0), ``[T]`` each, to ``[T, D]``."""
        if intermediate_tensors is not None:
            raise UsageError(f"{type(self).__name__} is no pipeline stage: it takes token ids")
        hidden = self.embeddings(input_ids, positions, token_type_ids, inputs_embeds)
        encoded: torch.Tensor = self.encoder(hidden, cu_seqlens=cu_seqlens)
        return encoded

    def pool(self, hidden: torch.Tensor, cu_seqlens: CuSeqlens = None) -> torch.Tensor:
        """``hidden [T, D]`` to one vector per text ``[B, D]``.

        Raises:
            UsageError: the folder asks for a pooling step that is not here, or the borders do not
                fit.
        """
        if self._pooling.unsupported:
            raise UsageError(f"no pooling step here for: {', '.join(self._pooling.unsupported)}")
        pooled: torch.Tensor = self.pooling(hidden, cu_seqlens)
        return pooled

    def pooler_output(self, hidden: torch.Tensor, cu_seqlens: CuSeqlens = None) -> torch.Tensor:
        """``hidden [T, D]`` to BERT's own summary of each text ``[B, D]``.

        Raises:
            UsageError: the checkpoint came without the pooler's weights.
        """
        if self.pooler is None:
            raise UsageError("the checkpoint has no pooler weights")
        spans = sequence_spans(cu_seqlens, hidden.shape[0])
        summary: torch.Tensor = self.pooler(hidden[[start for start, _ in spans]])
        return summary

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Place checkpoint tensors; gives the names of the parameters that got any."""
        loader = AutoWeightsLoader(self)
        loaded = loader.load_weights(weights, mapper=self.hf_to_loadkit_mapper)
        if not any(name.startswith("pooler.") for name in loaded):
            self.pooler = None
        return loaded


def _norm(config: LoadkitConfig) -> LayerNorm:
    """The family's norm."""
    hf_config: Any = config.model_config.hf_config
    return LayerNorm(
        DecoderSizes.of(hf_config).hidden,
        eps=real(hf_config, "layer_norm_eps", 1e-12),
        dtype=config.model_config.dtype,
    )
