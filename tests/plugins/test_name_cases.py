"""Whole loads of checkpoints whose names, ties or vocabularies are not the model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import loadkit
from helpers.checkpoints import llama_sd, write_cfg, write_shards
from loadkit.config import ParallelConfig
from loadkit.errors import PlanError

State = dict[str, torch.Tensor]


def write(folder: Path, state: State, shards: int = 1, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_cfg(folder, **config)
    write_shards(folder, state, shards)
    return folder


def is_whole(model: torch.nn.Module, state: State) -> None:
    """Every parameter of a tp=1 Llama holds what ``state`` (in its usual names) says."""
    found = model.state_dict()
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    for name, value in found.items():
        fused = next((f for f in parts if f in name), None)
        names = [name.replace(fused, part) for part in parts[fused]] if fused else [name]
        if "lm_head" in name and "lm_head.weight" not in state:
            names = ["model.embed_tokens.weight"]
        expected = torch.cat([state[part] for part in names])
        rows = expected.shape[0]
        assert torch.equal(value[:rows], expected), name
        assert not value[rows:].any(), name


def problems(folder: Path, **options: Any) -> list[Any]:
    plan = loadkit.plan(folder, **options)
    assert not plan.ok
    with pytest.raises(PlanError):
        loadkit.load(folder, **options)
    return list(plan.problems)


# -- NM-01 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("first", ["embed_tokens", "lm_head"])
def test_NM_01_a_tied_checkpoint_may_store_its_head_too(
    tmp_path: Path, first: str, tp: int
) -> None:
    state = llama_sd(head=False)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    if first == "lm_head":
        state = dict(reversed(state.items()))
    write(tmp_path, state, shards=3, tie_word_embeddings=True)
    for rank in range(tp):
        model = loadkit.load_model(tmp_path, parallel=ParallelConfig(tp_size=tp, tp_rank=rank))
        assert model.lm_head.weight is model.model.embed_tokens.weight
        if tp == 1:
            is_whole(model, state)


def test_NM_01_a_tied_head_that_differs_is_never_dropped(tmp_path: Path) -> None:
    state = llama_sd(head=True)
    write(tmp_path, state, tie_word_embeddings=True)
    with pytest.raises(loadkit.LoadkitError) as caught:
        loadkit.load(tmp_path)
    assert "lm_head" in str(caught.value) or "embed_tokens" in str(caught.value)
    assert "tie_word_embeddings" in str(caught.value)


# -- NM-02 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prefix",
    [
        pytest.param(prefix, id=f"NM-02-{prefix or 'none'}")
        for prefix in (
            "",
            "model.",
            "backbone.",
            "transformer.",
            "model.model.",
            "model.language_model.",
            "language_model.model.",
        )
    ],
)
def test_NM_02_every_spelling_of_the_prefix_loads(tmp_path: Path, prefix: str) -> None:
    write(tmp_path, llama_sd(prefix=prefix), shards=2)
    is_whole(loadkit.load_model(tmp_path), llama_sd())


def test_NM_02_an_unknown_prefix_shows_names_and_what_would_match(tmp_path: Path) -> None:
    write(tmp_path, llama_sd(prefix="body.net."))
    found = problems(tmp_path)
    unexpected = [p for p in found if p.tensor and p.tensor.startswith("body.net.")]
    assert len(unexpected) == 20
    text = " ".join(f"{p.message} {p.hint or ''}" for p in found)
    assert "names match if" in text
    assert "'body.net.'" in text


# -- NM-05, NM-06 --------------------------------------------------------------------------------


def test_NM_05_harmless_extras_are_listed_and_a_typo_is_a_problem(tmp_path: Path) -> None:
    state = llama_sd()
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    result = loadkit.load(write(tmp_path / "good", state))
    is_whole(result.model, llama_sd())
    skipped = [row for row in result.plan.rows if row.kind == "skipped"]
    assert [row.tensor for row in skipped] == ["model.layers.0.self_attn.rotary_emb.inv_freq"]

    state["model.layers.0.mlp.gate_projj.weight"] = state.pop("model.layers.0.mlp.gate_proj.weight")
    state["vision_tower.patch.weight"] = torch.ones(2)
    found = problems(write(tmp_path / "typo", state))
    assert {p.tensor for p in found if p.tensor} >= {
        "model.layers.0.mlp.gate_projj.weight",
        "vision_tower.patch.weight",
    }
    assert any("gate_up_proj" in (p.parameter or "") for p in found), "the hole is a problem too"
    [typo] = [p for p in found if p.tensor == "model.layers.0.mlp.gate_projj.weight"]
    assert "model.layers.0.mlp.gate_proj.weight" in f"{typo.message} {typo.hint}"


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda n: "_orig_mod.module." + n, id="NM-06-compiled-ddp"),
        pytest.param(lambda n: "module._orig_mod." + n, id="NM-06-ddp-compiled"),
        pytest.param(lambda n: n.replace("layers.0.", "layers.0._orig_mod."), id="NM-06-middle"),
    ],
)
def test_NM_06_a_wrapped_models_checkpoint_loads(tmp_path: Path, wrap: Any) -> None:
    write(tmp_path, {wrap(name): value for name, value in llama_sd().items()})
    is_whole(loadkit.load_model(tmp_path), llama_sd())


# -- CFG-04, CFG-05 ------------------------------------------------------------------------------


def test_CFG_04_a_missing_untied_head_is_a_problem_that_names_it(tmp_path: Path) -> None:
    write(tmp_path, llama_sd(head=False), shards=2)
    found = problems(tmp_path)
    assert [p.parameter for p in found] == ["lm_head.weight"]
    assert "not in any of the 2 file" in found[0].message
    assert "tie_word_embeddings" in (found[0].hint or "")


def test_CFG_04_a_tie_said_in_the_text_config_counts(tmp_path: Path) -> None:
    write_cfg(tmp_path, drop=("tie_word_embeddings",), text_config={"tie_word_embeddings": True})
    write_shards(tmp_path, llama_sd(head=False), 1)
    is_whole(loadkit.load_model(tmp_path), llama_sd(head=False))


@pytest.mark.parametrize("vocab_size", [40, 64], ids=["CFG-05-more", "CFG-05-fewer"])
def test_CFG_05_other_rows_than_vocab_size_are_never_cut(tmp_path: Path, vocab_size: int) -> None:
    write(tmp_path, llama_sd(vocab=42), vocab_size=vocab_size)
    found = problems(tmp_path)
    assert {p.tensor for p in found if p.tensor} == {"model.embed_tokens.weight", "lm_head.weight"}
    for problem in found:
        text = f"{problem.message} {problem.hint}"
        assert "[42, 16]" in text
        assert f"vocab_size {vocab_size}" in text


# -- UX-01 ---------------------------------------------------------------------------------------


def test_UX_01_a_wrong_shape_says_everything(tmp_path: Path) -> None:
    state = llama_sd()
    state["model.layers.1.mlp.up_proj.weight"] = torch.zeros(31, 16)
    write(tmp_path, state, shards=2)
    found = problems(tmp_path, parallel=ParallelConfig(tp_size=2, tp_rank=1))
    [problem] = [p for p in found if p.tensor]
    assert problem.tensor == "model.layers.1.mlp.up_proj.weight"
    assert problem.parameter == "model.layers.1.mlp.gate_up_proj.weight"
    for part in ("[31, 16]", "shard", "tp rank 1 of 2"):
        assert part in problem.message
