"""Llama and Mistral equal transformers, however they are stored and over however many ranks."""

from __future__ import annotations

from typing import Any

import torch

from helpers.decoder_family import SIZES, DecoderFamilyTests, same
from helpers.families import build, load, positions_of, run

SCALED = {"factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **SCALED}


class TestLlama(DecoderFamilyTests):
    model = "loadkit_models.llama:LlamaForCausalLM"
    oracle = ("LlamaConfig", "LlamaForCausalLM")
    variants = {
        "untied": {},
        "tied": {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e5}},
        "biases": {"attention_bias": True, "mlp_bias": True},
        "head_dim": {"head_dim": 6, "rms_norm_eps": 1e-3},
        "one_kv_head": {"num_key_value_heads": 1},
        "all_kv_heads": {"num_key_value_heads": 8, "hidden_act": "gelu"},
        "linear": {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}},
        "yarn": {"rope_parameters": {"rope_type": "yarn", **SCALED}},
        "llama3": {"rope_parameters": LLAMA3},
    }
    joined = ("biases", "tied")

    def test_input_vectors_may_stand_for_ids(self, cases: Any) -> None:
        case = cases["untied-unfused"]
        model = build(case.model, case.config)
        load(model, case.weights)
        vectors = model.get_input_embeddings(case.ids)
        positions = positions_of(case.borders)
        hidden = model(None, positions, inputs_embeds=vectors, cu_seqlens=case.borders)
        same(hidden, case.hidden)


class TestMistral(DecoderFamilyTests):
    model = "loadkit_models.llama:MistralForCausalLM"
    oracle = ("MistralConfig", "MistralForCausalLM")
    variants = {
        "window": {"sliding_window": 4},
        "window_of_one": {"sliding_window": 1, "tie_word_embeddings": True},
        "no_window": {"sliding_window": None, "head_dim": 8},
    }
    joined = ("window",)

    def test_a_config_without_a_window_has_transformers_default(self) -> None:
        model = build(self.model, dict(SIZES))
        assert {layer.self_attn.attn.sliding_window for layer in model.model.layers} == {4096}


def test_a_dynamic_rope_past_the_trained_length_equals_transformers() -> None:
    class Dynamic(TestLlama):
        __test__ = False
        variants = {
            "dynamic": {
                "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
            }
        }

    reference = Dynamic.reference("dynamic")
    ids, positions = torch.arange(10), torch.arange(60, 70)
    with torch.inference_mode():
        expected = reference(ids[None], position_ids=positions[None]).logits[0]
    ours = build(TestLlama.model, reference.config.to_dict())
    load(ours, dict(reference.state_dict()))
    same(run(ours, ids, [0, 10], 60, logits=True)["logits"], expected)
