"""What Llama checkpoints may look like, and what a Llama refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoints import llama_sd
from helpers.families import build, fused, load
from loadkit.config import ParallelConfig
from loadkit.errors import ConfigFileError, ModelError, WeightLoadError

LLAMA = "loadkit_models.llama:LlamaForCausalLM"
TOY = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
    "vocab_size": 40,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
}
PREFIXES = [
    "model.",
    "",
    "backbone.",
    "transformer.",
    "model.model.",
    "model.language_model.",
    "language_model.model.",
]


@pytest.mark.parametrize("tensors", ["unfused", "fused"])
@pytest.mark.parametrize("prefix", PREFIXES, ids=lambda prefix: f"NM-02-{prefix or 'none'}")
def test_every_usual_prefix_loads(prefix: str, tensors: str) -> None:
    expected, model = build(LLAMA, TOY), build(LLAMA, TOY)
    load(expected, llama_sd())
    weights = llama_sd(prefix=prefix)
    loaded = load(model, fused(weights) if tensors == "fused" else weights)
    assert loaded == set(dict(model.named_parameters()))
    for (name, ours), (_, theirs) in zip(
        model.named_parameters(), expected.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("prefix", ["model.", "language_model."])
def test_a_head_under_a_wrapper_is_the_head(prefix: str) -> None:
    weights = llama_sd()
    weights[f"{prefix}lm_head.weight"] = weights.pop("lm_head.weight")
    model = build(LLAMA, TOY)
    load(model, weights)
    assert torch.equal(model.lm_head.weight[:40], llama_sd()["lm_head.weight"])


def test_a_tied_head_is_the_embeddings_very_parameter() -> None:
    model = build(LLAMA, {**TOY, "tie_word_embeddings": True})
    assert model.lm_head.weight is model.model.embed_tokens.weight
    loaded = load(model, llama_sd(head=False))
    assert "model.embed_tokens.weight" in loaded
    untied = build(LLAMA, TOY)
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


def test_CFG_04_the_flag_of_a_nested_config_ties() -> None:
    nested = {key: value for key, value in TOY.items() if key != "tie_word_embeddings"}
    model = build(LLAMA, {**nested, "text_config": {"tie_word_embeddings": True}})
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_CFG_04_a_missing_untied_head_is_not_among_the_loaded() -> None:
    model = build(LLAMA, TOY)
    loaded = model.load_weights(iter(llama_sd(head=False).items()))
    assert set(dict(model.named_parameters())) - loaded == {"lm_head.weight"}
    assert model.lm_head.weight.isnan().all()


def test_CFG_05_other_vocabulary_rows_are_an_error_that_names_everything() -> None:
    model = build(LLAMA, TOY)
    with pytest.raises(WeightLoadError) as caught:
        load(model, llama_sd(vocab=42))
    for part in ("model.embed_tokens.weight", "[42, 16]", "vocab_size 40", "set vocab_size to 42"):
        assert part in str(caught.value)


def test_NM_05_a_computed_table_is_passed_over_and_a_typo_is_not() -> None:
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    load(build(LLAMA, TOY), llama_sd() | table)
    with pytest.raises(WeightLoadError, match="gate_projj"):
        load(
            build(LLAMA, TOY),
            llama_sd() | {"model.layers.0.mlp.gate_projj.weight": torch.ones(32, 16)},
        )


SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 1,
    "vocab_size": 49152,
}


@pytest.mark.parametrize("tp", [2, 4, 9])
def test_TP_08_a_tp_that_does_not_divide_names_those_that_do(tp: int) -> None:
    with pytest.raises(ModelError, match="tp sizes that fit: 1, 3") as caught:
        build(LLAMA, SMOLLM2, ParallelConfig(tp_size=tp))
    assert caught.value.code == "TP_INDIVISIBLE"
    assert caught.value.detail["legal"] == [1, 3]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": None}, "has no hidden_size"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes'"),
        ({"rope_scaling": {"rope_type": "nope"}}, "rope type 'nope'"),
        ({"hidden_act": "what"}, "activation 'what'"),
    ],
)
def test_a_config_that_cannot_be_is_a_typed_error(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigFileError, match=said):
        build(LLAMA, {**TOY, **changes})


def test_the_table_and_the_entry_points_say_the_same(root: Path) -> None:
    import tomllib

    from loadkit_models.table import MODELS

    project = tomllib.loads((root / "plugins/models/pyproject.toml").read_text())
    points = project["project"]["entry-points"]["loadkit.models"]
    assert points == {name: value for name, (_, value) in MODELS.items()}
