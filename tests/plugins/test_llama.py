"""Llama and Mistral equal transformers, however they are stored and over however many ranks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from helpers.families import Case, Tensors, build, fused, load, positions_of, run, run_on_four_ranks
from loadkit.config import ParallelConfig
from loadkit_layers.attention import Attention
from loadkit_layers.kv_cache import KVCache

transformers = pytest.importorskip(
    "transformers", reason="the oracle of these tests, in the development requirements"
)

LLAMA = "loadkit_models.llama:LlamaForCausalLM"
MISTRAL = "loadkit_models.llama:MistralForCausalLM"
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "max_position_embeddings": 64,
}
SCALED = {"factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
BORDERS = [0, 11, 12, 19]
# float32 against float32: sums in another order
TOLERANCE: dict[str, Any] = {"rtol": 0, "atol": 1e-4}

VARIANTS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e5}},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "head_dim": {"head_dim": 6, "rms_norm_eps": 1e-3},
    "one_kv_head": {"num_key_value_heads": 1},
    "all_kv_heads": {"num_key_value_heads": 8, "hidden_act": "gelu"},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    "yarn": {"rope_parameters": {"rope_type": "yarn", **SCALED}},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            **SCALED,
        }
    },
    "mistral": {"sliding_window": 4},
    "mistral_wide": {"sliding_window": None, "head_dim": 8},
}


def oracle(name: str) -> Any:
    """transformers' model of a variant, every parameter random."""
    family = "Mistral" if name.startswith("mistral") else "Llama"
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **VARIANTS[name]})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    made = torch.Generator().manual_seed(len(name))
    for key, param in model.named_parameters():
        centre = 1.0 if "norm" in key else 0.0
        param.data.copy_(centre + 0.2 * torch.randn(param.shape, generator=made))
    return model


def make_case(name: str, *, fuse: bool) -> Case:
    """A variant with what transformers makes of three texts, each alone."""
    model = oracle(name)
    ids = torch.randint(0, 99, (19,), generator=torch.Generator().manual_seed(3))
    first = 60 if name == "dynamic" else 0  # past the trained length
    hidden, logits = [], []
    for start, end in pairwise(BORDERS):
        with torch.inference_mode():
            out = model(
                ids[None, start:end],
                # a dynamic rope stretches by the longest position of the whole call
                position_ids=positions_of([0, end - start], first)[None],
                output_hidden_states=True,
            )
        hidden.append(out.hidden_states[-1][0])
        logits.append(out.logits[0])
    weights = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    return Case(
        model=MISTRAL if name.startswith("mistral") else LLAMA,
        config=model.config.to_dict(),
        weights=fused(weights) if fuse else weights,
        ids=ids,
        borders=BORDERS,
        hidden=torch.cat(hidden),
        logits=torch.cat(logits),
        first_position=first,
    )


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    names = [name for name in VARIANTS if name != "dynamic"]
    made = {name: make_case(name, fuse=False) for name in names}
    return made | {f"{name}_fused": make_case(name, fuse=True) for name in names}


@pytest.fixture(scope="module")
def ranks(
    cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Tensors]]:
    return run_on_four_ranks(cases, tmp_path_factory.mktemp("ranks"))


NAMES = [f"{name}{form}" for name in VARIANTS if name != "dynamic" for form in ("", "_fused")]


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_equals_transformers(name: str, cases: dict[str, Case]) -> None:
    case = cases[name]
    model = build(case.model, case.config)
    load(model, case.weights)
    got = run(model, case.ids, case.borders, case.first_position, logits=True)
    torch.testing.assert_close(got["hidden"], case.hidden, **TOLERANCE)
    torch.testing.assert_close(got["logits"], case.logits, **TOLERANCE)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_real_ranks_equal_transformers(
    name: str, tp: int, cases: dict[str, Case], ranks: dict[str, list[Tensors]]
) -> None:
    for got in ranks[f"{name}/tp{tp}"]:
        torch.testing.assert_close(got["hidden"], cases[name].hidden, **TOLERANCE)
        torch.testing.assert_close(got["logits"], cases[name].logits, **TOLERANCE)


def test_a_dynamic_rope_past_the_trained_length_equals_transformers() -> None:
    model = oracle("dynamic")
    ids, positions = torch.arange(10), torch.arange(60, 70)
    with torch.inference_mode():
        expected = model(ids[None], position_ids=positions[None]).logits[0]
    ours = build(LLAMA, model.config.to_dict())
    load(ours, dict(model.state_dict()))
    got = run(ours, ids, [0, 10], 60, logits=True)
    torch.testing.assert_close(got["logits"], expected, **TOLERANCE)


@pytest.mark.parametrize("name", ["tied", "mistral", "llama3"])
def test_a_cache_per_attention_gives_the_logits_of_the_whole_text(
    name: str, cases: dict[str, Case]
) -> None:
    case = cases[name]
    model = build(case.model, case.config)
    load(model, case.weights)
    end = case.borders[1]
    for layer in model.modules():
        if isinstance(layer, Attention):
            layer.kv_cache = KVCache()
    parts = []
    with torch.inference_mode():
        for a, b in ((0, 5), *((i, i + 1) for i in range(5, end))):
            hidden = model(case.ids[a:b], torch.arange(a, b))
            parts.append(model.compute_logits(hidden))
    assert case.logits is not None
    torch.testing.assert_close(torch.cat(parts), case.logits[:end], **TOLERANCE)


def test_input_vectors_may_stand_for_ids(cases: dict[str, Case]) -> None:
    case = cases["untied"]
    model = build(case.model, case.config)
    load(model, case.weights)
    vectors = model.get_input_embeddings(case.ids)
    positions = positions_of(case.borders)
    hidden = model(None, positions, inputs_embeds=vectors, cu_seqlens=case.borders)
    torch.testing.assert_close(hidden, case.hidden, **TOLERANCE)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("form", ["unfused", "fused"])
def test_the_ranks_shards_put_together_are_the_checkpoint(form: str, tp: int) -> None:
    weights = dict(oracle("biases").state_dict())
    config = {**oracle("biases").config.to_dict()}
    models = [build(LLAMA, config, ParallelConfig(tp_size=tp, tp_rank=r)) for r in range(tp)]
    for model in models:
        load(model, fused(weights) if form == "fused" else weights)
    found: Tensors = {}
    for name, parts in {
        key: [dict(model.named_parameters())[key].data for model in models]
        for key, _ in models[0].named_parameters()
    }.items():
        layer = models[0].get_submodule(name.rpartition(".")[0])
        if "qkv_proj" in name or "gate_up_proj" in name:
            cut = [part.split(layer.output_partition_sizes) for part in parts]
            names = ("q_proj", "k_proj", "v_proj") if "qkv" in name else ("gate_proj", "up_proj")
            fused_name = name.split(".")[-2]
            for index, part_name in enumerate(names):
                step = layer.num_kv_head_replicas if part_name in ("k_proj", "v_proj") else 1
                pieces = [pieces[index] for pieces in cut[::step]]
                found[name.replace(fused_name, part_name)] = torch.cat(pieces)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            found[name] = torch.cat(parts, dim=1)
        elif "embed_tokens" in name or "lm_head" in name:
            whole = torch.cat(parts)
            assert not whole[99:].any()
            found[name] = whole[:99]
        else:
            assert all(torch.equal(part, parts[0]) for part in parts)
            found[name] = parts[0]
    assert found.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.equal(found[name], value), name
