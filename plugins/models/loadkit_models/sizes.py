"""The numbers of a config.json that a decoder's shapes follow from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from loadkit_models.config_fields import count

__all__ = ["DecoderSizes"]


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """Widths and counts over all ranks, as config.json names them or defaults them."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int

    @classmethod
    def of(cls, hf_config: Any) -> DecoderSizes:
        """Read them.

        Raises:
            ConfigFileError: E_CONFIG, one is missing or no count.
        """
        hidden, heads = count(hf_config, "hidden_size"), count(hf_config, "num_attention_heads")
        return cls(
            hidden=hidden,
            ffn=count(hf_config, "intermediate_size"),
            layers=count(hf_config, "num_hidden_layers"),
            heads=heads,
            kv_heads=count(hf_config, "num_key_value_heads", heads),
            head_size=count(hf_config, "head_dim", hidden // heads),
            vocab=count(hf_config, "vocab_size"),
        )
