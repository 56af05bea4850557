"""Qwen3 equals transformers, however it is stored and over however many ranks."""

from __future__ import annotations

from helpers.decoder_family import SIZES, DecoderFamilyTests
from helpers.families import build


class TestQwen3(DecoderFamilyTests):
    model = "loadkit_models.qwen3:Qwen3ForCausalLM"
    oracle = ("Qwen3Config", "Qwen3ForCausalLM")
    sizes = {**SIZES, "head_dim": 6}  # 8 heads of 6 on a width of 32
    variants = {
        "untied": {},
        "tied": {"tie_word_embeddings": True, "rms_norm_eps": 1e-3},
        "biases": {"attention_bias": True},
        "window": {
            "use_sliding_window": True,
            "sliding_window": 3,
            "max_window_layers": 1,
            "num_key_value_heads": 1,
        },
    }
    joined = ("biases", "tied")


def test_a_head_has_128_channels_where_the_config_does_not_say() -> None:
    model = build(TestQwen3.model, dict(SIZES))
    attention = model.model.layers[0].self_attn
    assert attention.q_norm.weight.shape == attention.k_norm.weight.shape == (128,)
    assert attention.o_proj.input_size == 8 * 128
