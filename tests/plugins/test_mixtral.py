"""Mixtral equals transformers, in the hub's names and in those of transformers 5."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import loadkit
from helpers.decoder_family import SIZES, DecoderFamilyTests, stack_experts
from helpers.families import Tensors
from helpers.saving import read, same

EXPERTS = 4


def stored_on_the_hub(weights: Tensors) -> Tensors:
    """``block_sparse_moe`` and w1, w3, w2 for each expert, by hand."""
    out: Tensors = {}
    for name, value in weights.items():
        at, _, leaf = name.replace(".mlp.", ".block_sparse_moe.").rpartition(".")
        if leaf == "gate_up_proj":
            for expert, both in enumerate(value):
                first, third = both.chunk(2)
                out[f"{at}.{expert}.w1.weight"] = first.clone()
                out[f"{at}.{expert}.w3.weight"] = third.clone()
        elif leaf == "down_proj":
            out |= {f"{at}.{e}.w2.weight": one.clone() for e, one in enumerate(value)}
        else:
            out[f"{at}.{leaf}"] = value
    return out


def as_transformers_has_it(weights: Tensors) -> Tensors:
    """Experts in two tensors of ``mlp``."""
    stacked = stack_experts(weights)
    return {name.replace(".block_sparse_moe.", ".mlp."): v for name, v in stacked.items()}


class TestMixtral(DecoderFamilyTests):
    model = "loadkit_models.mixtral:MixtralForCausalLM"
    oracle = ("MixtralConfig", "MixtralForCausalLM")
    sizes = {**SIZES, "num_local_experts": EXPERTS, "num_experts_per_tok": 2}
    variants = {"window": {"sliding_window": 5}}
    joined = ("window",)
    forms = {"unfused": dict, "stacked": as_transformers_has_it}
    layouts = {"ep4": {"tp_size": 4, "ep_size": 4}}

    @staticmethod
    def stored(reference: Any) -> Tensors:
        return stored_on_the_hub(DecoderFamilyTests.stored(reference))

    @staticmethod
    def model_names(weights: Tensors) -> Tensors:
        return {name.replace(".block_sparse_moe.", ".mlp."): v for name, v in weights.items()}


def test_saving_gives_the_hub_s_names_back(tmp_path: Path) -> None:
    reference = TestMixtral.reference("window")
    reference.save_pretrained(tmp_path / "a")
    loadkit.save(loadkit.load_model(tmp_path / "a", dtype="float32"), tmp_path / "b")
    same(read(tmp_path / "b"), TestMixtral.stored(reference))


def test_what_config_json_leaves_out_is_what_transformers_means() -> None:
    from helpers.families import build

    sizes = {key: value for key, value in SIZES.items() if "key_value" not in key}
    model = build(TestMixtral.model, sizes)
    layer = model.model.layers[0]
    assert layer.mlp.experts.num_experts == 8 and layer.mlp.experts.router.top_k == 2
    assert layer.self_attn.qkv_proj.total_num_kv_heads == 8
    assert layer.self_attn.rotary_emb.base == 1e6
    assert layer.input_layernorm.eps == 1e-5
    assert torch.is_tensor(layer.mlp.gate.weight)
