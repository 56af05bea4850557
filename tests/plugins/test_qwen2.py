"""Qwen2 equals transformers, however it is stored and over however many ranks."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.decoder_family import SIZES, DecoderFamilyTests
from helpers.families import build
from loadkit.errors import ConfigFileError

WINDOWS = {"use_sliding_window": True, "sliding_window": 4}


class TestQwen2(DecoderFamilyTests):
    model = "loadkit_models.qwen2:Qwen2ForCausalLM"
    oracle = ("Qwen2Config", "Qwen2ForCausalLM")
    variants = {
        "untied": {},
        "tied": {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e6}},
        "window_from_a_layer_on": {**WINDOWS, "max_window_layers": 1, "num_hidden_layers": 3},
        "window_everywhere": {**WINDOWS, "max_window_layers": 0},
        "layer_types": {
            **WINDOWS,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_key_value_heads": 1,
        },
        "yarn": {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "rope_theta": 1e4,
            }
        },
    }
    joined = ("untied", "tied")


def windows(**changes: Any) -> list[int | None]:
    model = build(TestQwen2.model, {**SIZES, "num_hidden_layers": 3, **changes})
    return [layer.self_attn.attn.sliding_window for layer in model.model.layers]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sliding_window": 9, "max_window_layers": 1}, [None] * 3),
        ({"sliding_window": 9, "layer_types": ["sliding_attention"] * 3}, [None] * 3),
        ({"use_sliding_window": True, "max_window_layers": 2}, [None, None, 4096]),
        ({"use_sliding_window": True, "max_window_layers": 0, "sliding_window": None}, [None] * 3),
        ({"use_sliding_window": True, "sliding_window": 9}, [None] * 3),  # from layer 28 on
    ],
)
def test_windows_are_where_the_config_says(changes: Any, expected: Any) -> None:
    assert windows(**changes) == expected


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layer_types": ["full_attention"]}, "1 entries, not one entry for each of 3 layers"),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention'"),
        ({"layer_types": ["full_attention", "what", 3]}, r"layer_types\[1\] is 'what'"),
        ({"max_window_layers": -1}, "max_window_layers is -1"),
        ({"use_sliding_window": 1}, "use_sliding_window is 1"),
        ({"use_sliding_window": True, "sliding_window": "far"}, "sliding_window is 'far'"),
    ],
)
def test_windows_that_cannot_be_are_typed_errors(changes: Any, said: str) -> None:
    with pytest.raises(ConfigFileError, match=said):
        windows(**changes)
