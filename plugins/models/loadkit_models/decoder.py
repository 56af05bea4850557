"""What decoder families share: their layers, and the words in which a family describes its own.

# T tokens, D model width, F feed-forward width, H query heads, K key/value heads, R tp size

A family is a ``DecoderSpec``: sizes, one ``LayerSpec`` per layer, a norm. Module names are those of
checkpoints, but that q, k, v are one ``qkv_proj`` and gate, up one ``gate_up_proj``. A family whose
layers add up in another order brings a layer class of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from loadkit.config import LoadkitConfig
from loadkit.errors import UsageError
from loadkit_layers.activation import get_act_and_mul_fn
from loadkit_layers.attention import Attention
from loadkit_layers.linear import RowParallelLinear
from loadkit_layers.merged_linear import MergedColumnParallelLinear, QKVParallelLinear
from loadkit_layers.pipeline import IntermediateTensors, PPMissingLayer, make_layers
from loadkit_layers.rotary_embedding import RotaryEmbedding
from loadkit_layers.sequences import CuSeqlens
from loadkit_layers.vocab_parallel_embedding import VocabParallelEmbedding
from loadkit_models.building import join, layer_options
from loadkit_models.mixture import Mixture, MixtureSpec
from loadkit_models.sizes import DecoderSizes

__all__ = [
    "Decoder",
    "DecoderAttention",
    "DecoderLayer",
    "DecoderMLP",
    "DecoderSpec",
    "LayerSpec",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """What one layer is made of, beyond the sizes.

    Attributes:
        rope: gives the rotary embedding, one module for all layers that rotate alike.
        scale: what attention scores are multiplied by.
        window: how far attention sees, as ``Attention`` counts it; None is no window.
        causal: a token sees no later one.
        soft_cap: cap of the attention scores; None is no cap.
        qk_norm: queries and keys are normed head by head, before they are rotated.
        qkv_bias: q, k and v have biases.
        o_bias: the attention's output projection has one.
        mlp_bias: gate, up and down have biases.
        act: the feed-forward's activation, as config.json names it.
        mixture: the feed-forward is a mixture of experts; None: it is one.
    """

    rope: Callable[[], RotaryEmbedding]
    scale: float
    window: int | None = None
    causal: bool = True
    soft_cap: float | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    act: str = "silu"
    mixture: MixtureSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A family's model, as one config.json asks for it.

    Attributes:
        sizes: widths and counts over all ranks.
        layers: one entry per layer.
        norm: makes a norm of a width.
        layer_class: builds a layer; None is ``DecoderLayer``.
        embed_scale: what word vectors are multiplied by, rounded to their dtype first.
        logit_soft_cap: cap of the logits; None is no cap.
    """

    sizes: DecoderSizes
    layers: tuple[LayerSpec, ...]
    norm: Callable[[int], nn.Module]
    layer_class: type[DecoderLayer] | None = None
    embed_scale: float = 1.0
    logit_soft_cap: float | None = None

    @property
    def widths(self) -> list[int]:
        """Sizes beside heads that every tp rank cuts. A mixture's are checked by its layer."""
        return [self.sizes.ffn] if any(layer.mixture is None for layer in self.layers) else []


class DecoderMLP(nn.Module):
    """Gated feed-forward: ``down(act(gate(x)) * up(x))``, gate and up in one parameter."""

    def __init__(
        self, sizes: DecoderSizes, layer: LayerSpec, *, config: LoadkitConfig, prefix: str
    ) -> None:
        super().__init__()
        common = {**layer_options(config), "return_bias": False}
        self.gate_up_proj = MergedColumnParallelLinear(
            sizes.hidden,
            [sizes.ffn] * 2,
            layer.mlp_bias,
            prefix=join(prefix, "gate_up_proj"),
            **common,
        )
        self.down_proj = RowParallelLinear(
            sizes.ffn, sizes.hidden, layer.mlp_bias, prefix=join(prefix, "down_proj"), **common
        )
        self.act_fn = get_act_and_mul_fn(layer.act)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[T, D]`` to ``[T, D]``."""
        gate_up = self.gate_up_proj(hidden)
        down: torch.Tensor = self.down_proj(self.act_fn(gate_up))
        return down


class DecoderAttention(nn.Module):
    """Grouped-query attention with rotary positions; q, k and v in one parameter."""

    def __init__(
        self, spec: DecoderSpec, layer: LayerSpec, *, config: LoadkitConfig, prefix: str
    ) -> None:
        super().__init__()
        sizes, common = spec.sizes, {**layer_options(config), "return_bias": False}
        self.head_size = sizes.head_size
        self.qkv_proj = QKVParallelLinear(
            sizes.hidden,
            sizes.head_size,
            sizes.heads,
            sizes.kv_heads,
            layer.qkv_bias,
            prefix=join(prefix, "qkv_proj"),
            **common,
        )
        self.o_proj = RowParallelLinear(
            sizes.heads * sizes.head_size,
            sizes.hidden,
            layer.o_bias,
            prefix=join(prefix, "o_proj"),
            **common,
        )
        self.q_norm = spec.norm(sizes.head_size) if layer.qk_norm else None
        self.k_norm = spec.norm(sizes.head_size) if layer.qk_norm else None
        self.rotary_emb = layer.rope()
        self.attn = Attention(
            self.qkv_proj.num_heads,
            sizes.head_size,
            layer.scale,
            self.qkv_proj.num_kv_heads,
            sliding_window=layer.window,
            causal=layer.causal,
            logits_soft_cap=layer.soft_cap,
            prefix=join(prefix, "attn"),
        )

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, *, cu_seqlens: CuSeqlens = None
    ) -> torch.Tensor:
        """``positions [T]`` and ``hidden [T, D]`` to ``[T, D]``."""
        qkv: torch.Tensor = self.qkv_proj(hidden)
        query, key, value = qkv.split(self.qkv_proj.output_partition_sizes, dim=-1)
        query, key = self._normed(self.q_norm, query), self._normed(self.k_norm, key)
        query, key = self.rotary_emb(positions, query, key)
        out: torch.Tensor = self.o_proj(self.attn(query, key, value, cu_seqlens=cu_seqlens))
        return out

    def _normed(self, norm: nn.Module | None, x: torch.Tensor) -> torch.Tensor:
        """``x [T, H/R*Dh]`` with each head normed, where there is a norm."""
        if norm is None:
            return x
        heads: torch.Tensor = norm(x.unflatten(-1, (-1, self.head_size)))
        return heads.flatten(-2)


def feed_forward(
    sizes: DecoderSizes, layer: LayerSpec, *, config: LoadkitConfig, prefix: str
) -> nn.Module:
    """A layer's feed-forward part, one or a mixture of experts."""
    if layer.mixture is None:
        return DecoderMLP(sizes, layer, config=config, prefix=prefix)
    return Mixture(sizes.hidden, layer.mixture, layer.act, config=config, prefix=prefix)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each on the normed stream and added to it."""

    def __init__(
        self, spec: DecoderSpec, layer: LayerSpec, *, config: LoadkitConfig, prefix: str
    ) -> None:
        super().__init__()
        self.self_attn = DecoderAttention(
            spec, layer, config=config, prefix=join(prefix, "self_attn")
        )
        self.mlp = feed_forward(spec.sizes, layer, config=config, prefix=join(prefix, "mlp"))
        self.input_layernorm = spec.norm(spec.sizes.hidden)
        self.post_attention_layernorm = spec.norm(spec.sizes.hidden)

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, *, cu_seqlens: CuSeqlens = None
    ) -> torch.Tensor:
        """``positions [T]`` and ``hidden [T, D]`` to ``[T, D]``."""
        normed = self.input_layernorm(hidden)
        hidden = hidden + self.self_attn(positions, normed, cu_seqlens=cu_seqlens)
        added: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return added


class Decoder(nn.Module):
    """Embedding, layers and the last norm; over pipeline stages, this stage's part of them.

    Args:
        spec: the whole model.
        config: the bundle; its ``parallel_config`` says which stage this is.
        prefix: the dotted name.
        tied: the head is the embedding's table, so the last stage has it too.
    """

    def __init__(
        self, spec: DecoderSpec, *, config: LoadkitConfig, prefix: str, tied: bool = False
    ) -> None:
        super().__init__()
        parallel = config.parallel_config
        self.is_first = parallel.pp_rank == 0
        self.is_last = parallel.pp_rank == parallel.pp_size - 1
        self.hidden_size = spec.sizes.hidden
        self.embed_scale = spec.embed_scale
        self.embed_tokens = (
            VocabParallelEmbedding(
                spec.sizes.vocab,
                spec.sizes.hidden,
                prefix=join(prefix, "embed_tokens"),
                **layer_options(config),
            )
            if self.is_first or (self.is_last and tied)
            else PPMissingLayer("embedding, of pipeline stage 0")
        )
        make = spec.layer_class or DecoderLayer

        def layer(*, prefix: str) -> nn.Module:
            index = int(prefix.rpartition(".")[2])
            return make(spec, spec.layers[index], config=config, prefix=prefix)

        self.start_layer, self.end_layer, self.layers = make_layers(
            len(spec.layers), layer, join(prefix, "layers"), parallel
        )
        self.norm = (
            spec.norm(spec.sizes.hidden)
            if self.is_last
            else PPMissingLayer(f"last norm, of pipeline stage {parallel.pp_size - 1}")
        )

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``input_ids [T]`` to word vectors ``[T, D]``, scaled."""
        vectors: torch.Tensor = self.embed_tokens(input_ids)
        if self.embed_scale == 1.0:
            return vectors
        # Checkpoints were trained with the factor rounded to their dtype.
        return vectors * torch.tensor(self.embed_scale, dtype=vectors.dtype, device="cpu")

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        *,
        cu_seqlens: CuSeqlens = None,
    ) -> torch.Tensor | IntermediateTensors:
        """What goes in and ``positions [T]`` to hidden states ``[T, D]``.

        Args:
            input_ids: ``[T]``; read by the first stage.
            positions: ``[T]``.
            intermediate_tensors: of the stage before; for every stage but the first.
            inputs_embeds: ``[T, D]``, in place of ids.
            cu_seqlens: borders of several sequences.

        Returns:
            Normed hidden states on the last stage; on others what the next stage takes.

        Raises:
            UsageError: the stage was not given what it needs.
        """
        hidden = self._input(input_ids, intermediate_tensors, inputs_embeds)
        for index in range(self.start_layer, self.end_layer):
            hidden = self.layers[index](positions, hidden, cu_seqlens=cu_seqlens)
        if not self.is_last:
            return IntermediateTensors({"hidden_states": hidden})
        normed: torch.Tensor = self.norm(hidden)
        return normed

    def _input(
        self,
        input_ids: torch.Tensor | None,
        before: IntermediateTensors | None,
        inputs_embeds: torch.Tensor | None,
    ) -> torch.Tensor:
        """What this stage's first layer takes: ``[T, D]``."""
        if not self.is_first:
            if before is None:
                raise UsageError("a later pipeline stage needs intermediate_tensors")
            return before["hidden_states"]
        if before is not None:
            raise UsageError("the first pipeline stage takes token ids, not intermediate_tensors")
        if inputs_embeds is not None:
            return inputs_embeds
        if input_ids is None:
            raise UsageError("the model needs input_ids or inputs_embeds")
        return self.embed(input_ids)
