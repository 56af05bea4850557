"""Gemma 3's text model equals transformers, however it is stored and over however many ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import loadkit
from helpers.checkpoints import write_shards
from helpers.decoder_family import SIZES, DecoderFamilyTests, same
from helpers.families import Case, build, fused, load, positions_of, run
from loadkit.errors import ConfigFileError

LOCAL, GLOBAL = "sliding_attention", "full_attention"
SCALED = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5}


class TestGemma3(DecoderFamilyTests):
    model = "loadkit_models.gemma3:Gemma3ForCausalLM"
    oracle = ("Gemma3TextConfig", "Gemma3ForCausalLM")
    sizes = {
        **SIZES,
        "head_dim": 6,
        "query_pre_attn_scalar": 11,
        "sliding_window": 4,
        "num_hidden_layers": 3,
        "sliding_window_pattern": 2,
    }
    variants = {
        "tied": {},
        "untied": {"tie_word_embeddings": False, "attention_bias": True},
        "rope_scaling": {
            "rope_parameters": {LOCAL: {"rope_type": "default", "rope_theta": 1e3}, GLOBAL: SCALED}
        },
        "all_local": {"sliding_window_pattern": 6, "num_key_value_heads": 1},
        "layer_types": {"layer_types": [GLOBAL, LOCAL, LOCAL], "rms_norm_eps": 1e-3},
        "soft_cap_of_logits": {"final_logit_softcapping": 2.0},
        "sees_later_tokens": {"use_bidirectional_attention": True, "sliding_window": 5},
    }
    norm_centre = 0.0
    joined = ("tied", "untied")

    def test_scaled_input_vectors_may_stand_for_ids(self, cases: dict[str, Case]) -> None:
        case = cases["tied-unfused"]
        model = build(case.model, case.config)
        load(model, case.weights)
        vectors = model.get_input_embeddings(case.ids)
        positions = positions_of(case.borders)
        hidden = model(None, positions, inputs_embeds=vectors, cu_seqlens=case.borders)
        same(hidden, case.hidden)

    @pytest.mark.parametrize("named", ["older", "newer"])
    def test_both_spellings_of_the_ropes_are_read(self, named: str, cases: dict[str, Case]) -> None:
        case = cases["rope_scaling-unfused"]
        config = dict(case.config)
        assert set(config["rope_parameters"]) == {LOCAL, GLOBAL}
        if named == "older":
            del config["rope_parameters"], config["layer_types"]
            config["rope_theta"], config["rope_local_base_freq"] = 1e5, 1e3
            config["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
            config["sliding_window_pattern"] = 2
        model = build(case.model, config)
        load(model, case.weights)
        same(run(model, case.ids, case.borders, 0, logits=False)["hidden"], case.hidden)

    def test_capped_attention_scores_equal_transformers_own_formula(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Its Gemma 3 has the formula and the setting, but does not pass one to the other.
        from transformers.models.gemma3 import modeling_gemma3

        reference = self.reference("tied")
        reference.config.attn_logit_softcapping = 1.5
        plain = modeling_gemma3.eager_attention_forward
        monkeypatch.setattr(
            modeling_gemma3,
            "eager_attention_forward",
            lambda *args, **kwargs: plain(*args, **{**kwargs, "softcap": 1.5}),
        )
        reference.set_attn_implementation("eager")
        ids = torch.arange(13)
        with torch.inference_mode():
            expected = reference(ids[None]).logits[0]
        model = build(self.model, reference.config.to_dict())
        load(model, self.stored(reference))
        same(run(model, ids, [0, 13], 0, logits=True)["logits"], expected)

    def test_the_embedding_scale_is_rounded_to_the_models_dtype(self) -> None:
        reference = self.reference("tied").to(torch.bfloat16)
        model = build(self.model, reference.config.to_dict())
        model.to(torch.bfloat16)
        load(model, self.stored(reference))
        ids = torch.arange(13)
        with torch.inference_mode():
            expected = reference.model.embed_tokens(ids)
            assert torch.equal(model.get_input_embeddings(ids), expected)

    @pytest.mark.parametrize("form", ["unfused", "fused"])
    @pytest.mark.parametrize(
        "prefix",
        [
            pytest.param(prefix, id=f"NM-02-{prefix or 'none'}")
            for prefix in ("", "model.", "model.language_model.", "language_model.model.")
        ],
    )
    def test_the_text_model_of_a_multimodal_checkpoint_loads(
        self, prefix: str, form: str, cases: dict[str, Case], tmp_path: Path
    ) -> None:
        case = cases["untied-unfused"]
        weights = fused(case.weights) if form == "fused" else dict(case.weights)
        head = weights.pop("lm_head.weight")
        weights = {prefix + name.removeprefix("model."): t for name, t in weights.items()}
        outer, text_model, _ = prefix.partition("language_model.")
        old = prefix.startswith("language_model.")
        weights[f"{'language_model.' if old else ''}lm_head.weight"] = head
        if text_model:
            weights[f"{outer}vision_tower.patch.weight"] = torch.ones(2)
            weights[f"{outer}multi_modal_projector.norm.weight"] = torch.ones(2)
        text = {key: value for key, value in case.config.items() if key != "architectures"}
        config = {"architectures": ["Gemma3ForCausalLM"], "text_config": text}
        (tmp_path / "config.json").write_text(json.dumps(config))
        write_shards(tmp_path, weights, 2)
        result = loadkit.load(tmp_path, dtype="float32")
        got = run(result.model, case.ids, case.borders, 0, logits=True)
        same(got["hidden"], case.hidden)
        assert case.logits is not None
        same(got["logits"], case.logits)
        skipped = {row.tensor for row in result.plan.rows if row.kind == "skipped"}
        assert skipped == {name for name in weights if "vision" in name or "multi_modal" in name}


def test_a_config_that_says_little_means_what_transformers_takes_it_for() -> None:
    """The 4b model's text config has these keys and no others, at other sizes."""
    transformers = pytest.importorskip("transformers", reason="the oracle of these tests")
    said = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 7,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    full = transformers.Gemma3TextConfig(**json.loads(json.dumps(said)))
    with torch.device("meta"):
        model = build(TestGemma3.model, {"text_config": said})
        other = build(TestGemma3.model, full.to_dict())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.embed_tokens.num_embeddings == full.vocab_size
    for index, (ours, theirs) in enumerate(
        zip(model.model.layers, other.model.layers, strict=True)
    ):
        attention, expected = ours.self_attn, theirs.self_attn
        kind = full.layer_types[index]
        assert attention.attn.extra_repr() == expected.attn.extra_repr()
        assert attention.attn.scale == full.query_pre_attn_scalar**-0.5
        assert attention.attn.sliding_window == (1024 if kind == LOCAL else None)
        assert attention.rotary_emb.extra_repr() == expected.rotary_emb.extra_repr()
        assert attention.rotary_emb.base == full.rope_parameters[kind]["rope_theta"]
        assert attention.rotary_emb.rope_type == ("default" if kind == LOCAL else "linear")
        assert ours.mlp.act_fn.approximate == "tanh"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0, not above 0"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping is -1.0, not above 0"),
        ({"attn_logit_softcapping": "x"}, "attn_logit_softcapping is 'x'"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        ({"rope_parameters": [1]}, "rope_parameters is"),
        ({"hidden_activation": "what"}, "activation 'what'"),
    ],
)
def test_a_config_that_cannot_be_is_a_typed_error(changes: Any, said: str) -> None:
    with pytest.raises(ConfigFileError, match=said):
        build(TestGemma3.model, {**TestGemma3.sizes, **changes})
