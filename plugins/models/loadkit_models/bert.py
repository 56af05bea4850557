"""BERT as an encoder: one vector per token, pooled to one per text where asked.

# T tokens, B texts, D model width
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import nn

from loadkit.auto_weights_loader import AutoWeightsLoader
from loadkit.config import LoadkitConfig
from loadkit.errors import ConfigFileError, UsageError
from loadkit.interfaces import PoolingModel, SupportsQuant
from loadkit.mapper import WeightsMapper
from loadkit_layers.linear import ReplicatedLinear
from loadkit_layers.pooler import Pooler
from loadkit_layers.sequences import CuSeqlens, sequence_spans
from loadkit_models.bert_layers import BertEmbeddings, BertEncoder
from loadkit_models.building import check_tp, join, layer_options
from loadkit_models.config_fields import text
from loadkit_models.sentence_transformers import read_pooling
from loadkit_models.sizes import DecoderSizes

__all__ = ["BertModel", "BertPooler"]

log = logging.getLogger("loadkit")


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


class BertModel(nn.Module, PoolingModel, SupportsQuant):
    """The encoder.

    ``forward`` gives a vector per token. ``pool`` gives one per text, as the sentence-transformers
    folder says (without one: the mean). ``pooler_output`` is BERT's own summary; checkpoints that
    leave its weights out load as well, and then there is no ``pooler``.

    Raises:
        ConfigFileError: E_CONFIG, config.json lacks a size or has an impossible one, or asks for
            relative positions.
        ModelError: ``TP_INDIVISIBLE``, naming the tp sizes that would do.
    """

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {"qkv_proj": ["query", "key", "value"]}
    hf_to_loadkit_mapper: ClassVar[WeightsMapper] = WeightsMapper(
        # Rules that lead to themselves say which of the spellings a save writes.
        orig_to_new_prefix={"bert.": "", "": ""},
        orig_to_new_suffix={
            ".gamma": ".weight",  # as TensorFlow named them
            ".beta": ".bias",
            ".weight": ".weight",
            ".bias": ".bias",
        },
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
        self._has_pooler = False  # until a weight of it comes
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
        """Place checkpoint tensors; gives the names of the parameters that got any.

        Weights may come in several calls. A call that fills all the rest, where no pooler weight
        ever came, tells that the checkpoint has none: then the model has no pooler either.
        """
        loader = AutoWeightsLoader(self)
        loaded = loader.load_weights(weights, mapper=self.hf_to_loadkit_mapper)
        own = {name for name, _ in self.named_parameters()}
        pooler = {name for name in own if name.startswith("pooler.")}
        self._has_pooler = self._has_pooler or bool(pooler & loaded)
        if pooler and not self._has_pooler and own - pooler <= loaded:
            log.info("the checkpoint has no pooler weights, so the model has no pooler")
            self.pooler = None
        return loaded
