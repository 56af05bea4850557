"""A decoder with its head: names on disk, tying, logits. A family says only what is its own.

# T tokens, D model width, V vocabulary

Over pipeline stages the head is on the last one. Where it is the embedding's table, the first and
the last stage have both: each reads the one tensor, under either of its names.

Tensors on disk may have any of the usual prefixes, and q, k, v (gate, up) may be fused already;
``CausalLM.hf_to_loadkit_mapper`` is the whole of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import nn

from loadkit.auto_weights_loader import AutoWeightsLoader
from loadkit.config import HFConfig, LoadkitConfig
from loadkit.errors import UsageError
from loadkit.interfaces import SupportsPP, SupportsQuant, TextGenerationModel
from loadkit.mapper import WeightsMapper
from loadkit_layers.layernorm import RMSNorm
from loadkit_layers.logits_processor import LogitsProcessor
from loadkit_layers.pipeline import IntermediateTensors, PPMissingLayer
from loadkit_layers.rotary_embedding import rope_from_config
from loadkit_layers.sequences import CuSeqlens
from loadkit_layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from loadkit_models.building import check_tp, join, layer_options
from loadkit_models.config_fields import flag, real, text, with_defaults
from loadkit_models.decoder import Decoder, DecoderSpec, LayerSpec
from loadkit_models.sizes import DecoderSizes

__all__ = ["CausalLM"]


class CausalLM(nn.Module, TextGenerationModel, SupportsQuant, SupportsPP):
    """What decoder families have in common; ``describe`` and ``config_defaults`` make a family.

    Raises:
        ConfigFileError: E_CONFIG, config.json lacks a size or has an impossible value.
        ModelError: ``TP_INDIVISIBLE`` or ``PP_INDIVISIBLE``, naming the sizes that would do.
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
    # What the family's config.json may leave out, and what it means then; null is not left out.
    config_defaults: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, *, config: LoadkitConfig, prefix: str = "") -> None:
        super().__init__()
        hf_config = with_defaults(config.model_config.hf_text_config, self.config_defaults)
        spec = self.describe(hf_config, config.model_config.dtype)
        sizes = spec.sizes
        check_tp(
            config.parallel_config,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            widths=spec.widths,
            prefix=prefix,
        )
        own = config.model_config.tie_word_embeddings
        tied = flag(hf_config, "tie_word_embeddings") if own is None else own
        self.model = Decoder(spec, config=config, prefix=join(prefix, "model"), tied=tied)
        self.lm_head = self._head(sizes, self.model, config, join(prefix, "lm_head"), tied)
        self.logits_processor = LogitsProcessor(sizes.vocab, soft_cap=spec.logit_soft_cap)

    @staticmethod
    def _head(
        sizes: DecoderSizes, model: Decoder, config: LoadkitConfig, prefix: str, tied: bool
    ) -> nn.Module:
        """The head, where this stage has one."""
        if not model.is_last and not (tied and model.is_first):
            return PPMissingLayer(f"head, of pipeline stage {config.parallel_config.pp_size - 1}")
        head = ParallelLMHead(sizes.vocab, sizes.hidden, prefix=prefix, **layer_options(config))
        table = model.embed_tokens
        if tied and isinstance(table, VocabParallelEmbedding):
            head.tie_weights(table)
        return head

    @classmethod
    def describe(cls, hf_config: HFConfig, dtype: torch.dtype) -> DecoderSpec:
        """The model that a config asks for: all layers alike, nothing but what Llama has.

        Args:
            hf_config: the text model's config, ``config_defaults`` filled in.
            dtype: of the norms.
        """
        sizes, bias = DecoderSizes.of(hf_config), flag(hf_config, "attention_bias")
        layer = LayerSpec(
            rope=cache(partial(rope_from_config, hf_config, head_size=sizes.head_size)),
            scale=sizes.head_size**-0.5,
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=flag(hf_config, "mlp_bias"),
            act=text(hf_config, "hidden_act", "silu"),
        )
        return DecoderSpec(
            sizes=sizes,
            layers=(layer,) * sizes.layers,
            norm=partial(RMSNorm, eps=real(hf_config, "rms_norm_eps", 1e-6), dtype=dtype),
        )

    def get_input_embeddings(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``input_ids [T]`` to what ``forward`` takes as ``inputs_embeds``: ``[T, D]``."""
        return self.model.embed(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        *,
        cu_seqlens: CuSeqlens = None,
    ) -> torch.Tensor | IntermediateTensors:
        """``input_ids [T]`` and ``positions [T]`` to hidden states ``[T, D]``.

        A pipeline stage that is not the first takes ``intermediate_tensors`` in place of ids, and
        one that is not the last gives them.
        """
        hidden: torch.Tensor | IntermediateTensors = self.model(
            input_ids, positions, intermediate_tensors, inputs_embeds, cu_seqlens=cu_seqlens
        )
        return hidden

    def make_empty_intermediate_tensors(
        self, tokens: int, dtype: torch.dtype, device: torch.device
    ) -> IntermediateTensors:
        """Room for what the stage before hands over for so many tokens."""
        room = torch.empty(tokens, self.model.hidden_size, dtype=dtype, device=device)
        return IntermediateTensors({"hidden_states": room})

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden [T, D]`` to ``[T, V]``, the same on every tp rank.

        Raises:
            UsageError: this is not the last pipeline stage.
        """
        if not self.model.is_last:
            raise UsageError("logits are computed by the last pipeline stage; this is another")
        logits: torch.Tensor = self.logits_processor(self.lm_head, hidden)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Place checkpoint tensors; gives the names of the parameters that got any."""
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_loadkit_mapper)
