"""Loading faults known from the field, end to end: each is right, or a typed problem."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import loadkit
from helpers.checkpoints import llama_sd, write_cfg, write_llama, write_shards
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.errors import ModelError, PlanError
from loadkit.load_plan import LoadPlan


def save(folder: Path, sd: dict[str, torch.Tensor], **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    write_cfg(folder, **config)
    save_file(sd, folder / "model.safetensors")
    return folder


def codes(plan: LoadPlan) -> dict[str, str | None]:
    return {p.code: p.tensor or p.parameter for p in plan.problems}


# -- dtypes ---------------------------------------------------------------------------------------


def test_CFG_02_auto_follows_the_config_else_the_checkpoint(tmp_path: Path) -> None:
    half = {k: v.to(torch.bfloat16) for k, v in llama_sd().items()}
    said = save(tmp_path / "said", half, torch_dtype="float32")
    assert loadkit.load(said).report.casts == [{"from": "bfloat16", "to": "float32", "tensors": 21}]
    unsaid = tmp_path / "unsaid"
    unsaid.mkdir()
    write_cfg(unsaid, drop=["torch_dtype", "dtype"])
    save_file(half, unsaid / "model.safetensors")
    result = loadkit.load(unsaid)
    assert result.plan.dtype == "bfloat16" and result.report.casts == []


def test_CFG_02_a_cast_that_makes_infinity_is_an_error_unless_forced(tmp_path: Path) -> None:
    sd = {k: v.to(torch.bfloat16) for k, v in llama_sd().items()}
    sd["model.norm.weight"][0] = 1e5
    folder = save(tmp_path / "m", sd, torch_dtype="float16")
    with pytest.raises(ModelError) as caught:
        loadkit.load(folder)
    assert (caught.value.code, caught.value.tensor) == ("CAST_OVERFLOW", "model.norm.weight")
    forced = loadkit.load(folder, dtype="float16")
    assert any("model.norm.weight" in text for text in forced.report.warnings)
    assert forced.model.model.norm.weight.isinf().sum() == 1


# -- heads, vocabularies, missing weights ---------------------------------------------------------


def test_CFG_04_an_untied_head_that_is_missing_is_an_error(tmp_path: Path) -> None:
    plan = loadkit.plan(save(tmp_path / "m", llama_sd(head=False), tie_word_embeddings=False))
    assert codes(plan) == {"MISSING": "lm_head.weight"}
    assert "tie_word_embeddings" in (plan.problems[0].hint or "")
    tied = loadkit.load(plan.source, hf_overrides={"tie_word_embeddings": True}).model
    assert tied.lm_head.weight is tied.model.embed_tokens.weight


def test_CFG_04_a_tie_in_a_nested_config_counts(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    write_cfg(folder, drop=["tie_word_embeddings"], text_config={"tie_word_embeddings": True})
    save_file(llama_sd(head=False), folder / "model.safetensors")
    model = loadkit.load_model(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("config", [40, 64])
def test_CFG_05_rows_that_are_not_the_vocabulary(tmp_path: Path, config: int) -> None:
    plan = loadkit.plan(save(tmp_path / "m", llama_sd(vocab=42), vocab_size=config))
    assert {p.code for p in plan.problems} == {"SHAPE_MISMATCH"}
    for problem in plan.problems:
        assert "[42, 16]" in problem.message and f"vocab_size {config}" in problem.message


def test_MEM_05_what_nothing_writes_is_named(tmp_path: Path) -> None:
    sd = {k: v for k, v in llama_sd().items() if "layers.1.mlp" not in k}
    folder = save(tmp_path / "m", sd)
    with pytest.raises(PlanError) as caught:
        loadkit.load(folder)
    assert [p.parameter for p in caught.value.problems] == [
        "model.layers.1.mlp.gate_up_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
    ]
    lenient = loadkit.load(folder, strict=False)
    assert set(lenient.report.initialised) == {p.parameter for p in caught.value.problems}
    assert not lenient.model.model.layers[1].mlp.down_proj.weight.any()
    allowed = LoadConfig(missing_ok={"model.layers.1.mlp.*": "pruned"})
    assert set(loadkit.load(folder, load_config=allowed).report.initialised.values()) == {"pruned"}


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("vocab", [40, 41, 64])
@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_TP_02_any_vocabulary_at_any_tp(
    tmp_path: Path, vocab: int, tied: bool, tp: int, load_format: str
) -> None:
    sizes = {"hidden": 24, "heads": 12, "kv_heads": 12, "ffn": 24, "layers": 1}
    write_llama(tmp_path, vocab=vocab, head=not tied, tie_word_embeddings=tied, **sizes)
    whole = loadkit.load_model(tmp_path, load_format=load_format)
    rows: dict[str, list[torch.Tensor]] = {"embed": [], "head": []}
    for at in range(tp):
        parallel = ParallelConfig(tp_size=tp, tp_rank=at)
        model = loadkit.load_model(tmp_path, parallel=parallel, load_format=load_format)
        rows["embed"].append(model.model.embed_tokens.weight)
        rows["head"].append(model.lm_head.weight)
    for key, weight in {
        "embed": whole.model.embed_tokens.weight,
        "head": whole.lm_head.weight,
    }.items():
        joined = torch.cat(rows[key])
        assert joined[:vocab].equal(weight[:vocab]) and weight[:vocab].any()
        assert not joined[vocab:].any()
        assert len(joined) % tp == 0
    assert torch.cat(rows["embed"]).shape == torch.cat(rows["head"]).shape


# -- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2])
def test_NM_01_an_equal_second_head_is_verified(tmp_path: Path, tp: int) -> None:
    sd = llama_sd(head=False)
    sd["lm_head.weight"] = sd["model.embed_tokens.weight"].clone()
    folder = save(tmp_path / "m", sd, tie_word_embeddings=True)
    for at in range(tp):
        parallel = ParallelConfig(tp_size=tp, tp_rank=at)
        result = loadkit.load(folder, parallel=parallel)
        assert result.model.lm_head.weight is result.model.model.embed_tokens.weight
        assert result.report.bytes_read == result.plan.bytes_to_read
    kinds = {row.tensor: row.kind for row in loadkit.plan(folder).rows}
    assert "tied" in (kinds["lm_head.weight"], kinds["model.embed_tokens.weight"])


@pytest.mark.parametrize("shards", [1, 2])
def test_NM_01_another_second_head_is_an_error(tmp_path: Path, shards: int) -> None:
    sd = llama_sd(head=False)
    sd["lm_head.weight"] = sd["model.embed_tokens.weight"].clone()
    sd["lm_head.weight"][39, 15] += 1
    write_cfg(tmp_path, tie_word_embeddings=True)
    write_shards(tmp_path, sd, shards)
    with pytest.raises(ModelError, match="tie_word_embeddings") as caught:
        loadkit.load(tmp_path)
    assert caught.value.code == "TIED_DIFFER"
    untied = loadkit.load_model(tmp_path, hf_overrides={"tie_word_embeddings": False})
    assert untied.lm_head.weight[:40].equal(sd["lm_head.weight"])


@pytest.mark.parametrize(
    "prefix",
    ["", "backbone.", "transformer.", "model.model.", "model.language_model.",
     "language_model.model."],
)  # fmt: skip
def test_NM_02_other_prefixes_load(tmp_path: Path, prefix: str) -> None:
    sd = llama_sd(prefix=prefix)
    model = loadkit.load_model(save(tmp_path / "m", sd))
    assert model.model.norm.weight.equal(sd[f"{prefix}norm.weight"])
    assert model.model.layers[1].mlp.down_proj.weight.equal(
        sd[f"{prefix}layers.1.mlp.down_proj.weight"]
    )


def test_NM_02_an_unknown_prefix_is_explained(tmp_path: Path) -> None:
    plan = loadkit.plan(save(tmp_path / "m", llama_sd(prefix="foo.")))
    assert plan.problems[0].code == "UNEXPECTED_TENSOR"
    assert "'foo.' is replaced by 'model.'" in (plan.problems[0].hint or "")


def test_NM_05_extra_tensors_are_ignored_by_rule_or_refused(tmp_path: Path) -> None:
    sd = llama_sd()
    sd |= {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
        "model.layers.2.mtp.weight": torch.ones(2),
        "vision_tower.patch.weight": torch.ones(2),
        "model.layers.0.mlp.gate_projj.weight": sd.pop("model.layers.0.mlp.gate_proj.weight"),
    }
    folder = save(tmp_path / "m", sd)
    plan = loadkit.plan(folder)
    assert [p.tensor for p in plan.problems if p.code == "UNEXPECTED_TENSOR"] == [
        "model.layers.0.mlp.gate_projj.weight",
        "model.layers.2.mtp.weight",
        "vision_tower.patch.weight",
    ]
    assert "PARTLY_WRITTEN" in codes(plan)
    skipped = {row.tensor: row.reason for row in plan.rows if row.kind == "skipped"}
    assert list(skipped) == ["model.layers.0.self_attn.rotary_emb.inv_freq"]
    assert all(skipped.values())
    lenient = loadkit.load(folder, strict=False)
    assert "vision_tower.patch.weight" in lenient.report.skipped


@pytest.mark.parametrize("wrap", ["_orig_mod.module.", "module._orig_mod.", "middle"])
def test_NM_06_wrapper_components_come_off(tmp_path: Path, wrap: str) -> None:
    plain = llama_sd()
    if wrap == "middle":
        sd = {k.replace("layers.0.", "layers.0._orig_mod."): v for k, v in plain.items()}
    else:
        sd = {wrap + k: v for k, v in plain.items()}
    model = loadkit.load_model(save(tmp_path / "m", sd))
    assert model.model.layers[0].mlp.down_proj.weight.equal(
        plain["model.layers.0.mlp.down_proj.weight"]
    )


# -- errors ---------------------------------------------------------------------------------------


def test_UX_01_one_bad_tensor_is_told_whole(tmp_path: Path) -> None:
    sd = llama_sd()
    sd["model.layers.1.mlp.up_proj.weight"] = torch.zeros(31, 16)
    write_cfg(tmp_path)
    write_shards(tmp_path, sd, 2)
    with pytest.raises(PlanError) as caught:
        loadkit.load(tmp_path)
    text = str(caught.value)
    for part in ("model.layers.1.mlp.up_proj.weight", "gate_up_proj", "[31, 16]", "[32, 16]"):
        assert part in text
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == text and again.problems == caught.value.problems


def test_a_cause_survives_pickling(tmp_path: Path) -> None:
    error = ModelError("outer", tensor="t", hint="do this")
    error.__cause__ = ValueError("inner")
    again = pickle.loads(pickle.dumps(error))
    assert (again.tensor, str(again), str(again.__cause__)) == ("t", "outer (do this)", "inner")


def test_a_loader_without_a_catalogue_is_opaque(tmp_path: Path) -> None:
    """A loader written the old way: it hands real tensors to the model."""
    from loadkit.tables import loaders

    sd = llama_sd()

    class OldLoader(loadkit.BaseModelLoader):
        def load_weights(self, model: torch.nn.Module, model_config: object) -> None:
            def weights() -> Iterator[tuple[str, torch.Tensor]]:
                yield from ((k, v.clone()) for k, v in sd.items())

            model.load_weights(weights())  # type: ignore[operator]

    loaders.register("old-style", OldLoader, override=True)
    write_cfg(tmp_path)
    plan = loadkit.plan(tmp_path, load_format="old-style")
    assert plan.ok and {row.exact for row in plan.rows if row.tensor} == {"opaque"}
    assert "OPAQUE_LOADER" in {note.code for note in plan.notes}
    result = loadkit.load(tmp_path, load_format="old-style")
    assert result.report.bytes_read == plan.bytes_to_read == sum(t.nbytes for t in sd.values())
    assert result.model.model.norm.weight.equal(sd["model.norm.weight"])
    del sd["model.norm.weight"]
    assert codes(loadkit.plan(tmp_path, load_format="old-style")) == {
        "MISSING": "model.norm.weight"
    }


def test_no_warning_is_logged_for_a_plain_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_llama(tmp_path)
    with caplog.at_level(logging.WARNING):
        loadkit.load(tmp_path)
    assert caplog.records == []
