"""A Llama with one parameter for each checkpoint tensor, for the race against transformers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from loadkit.auto_weights_loader import AutoWeightsLoader
from loadkit.config import LoadkitConfig

__all__ = ["UnfusedLlama"]


class UnfusedLlama(nn.Module):
    """The parameters of a Llama under their names on disk. It cannot run."""

    def __init__(self, *, config: LoadkitConfig, prefix: str = "") -> None:
        super().__init__()
        hf = config.model_config.hf_config
        width, ffn = hf.hidden_size, hf.intermediate_size
        kv_width = width // hf.num_attention_heads * hf.num_key_value_heads

        def linear(size_in: int, size_out: int) -> nn.Linear:
            return nn.Linear(size_in, size_out, bias=False)

        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(hf.vocab_size, width)
        self.model.layers = nn.ModuleList()
        for _ in range(hf.num_hidden_layers):
            layer = nn.Module()
            layer.self_attn, layer.mlp = nn.Module(), nn.Module()
            layer.self_attn.q_proj = linear(width, width)
            layer.self_attn.k_proj = linear(width, kv_width)
            layer.self_attn.v_proj = linear(width, kv_width)
            layer.self_attn.o_proj = linear(width, width)
            layer.mlp.gate_proj = linear(width, ffn)
            layer.mlp.up_proj = linear(width, ffn)
            layer.mlp.down_proj = linear(ffn, width)
            layer.input_layernorm = nn.RMSNorm(width)
            layer.post_attention_layernorm = nn.RMSNorm(width)
            self.model.layers.append(layer)
        self.model.norm = nn.RMSNorm(width)
        self.lm_head = linear(width, hf.vocab_size)
        if hf.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights)
