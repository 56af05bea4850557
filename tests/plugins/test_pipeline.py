"""Models over pipeline stages: each reads its own tensors, and together they are the model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import loadkit
from helpers.checkpoints import llama_sd, write_cfg, write_shards, write_st
from loadkit.config import LoadConfig, LoadkitConfig, ParallelConfig
from loadkit.errors import ModelError, PlanError, UsageError
from loadkit.generate import greedy
from loadkit.interfaces import SupportsPP, supports_pp
from loadkit.load_plan import LoadPlan
from loadkit.loader import LoadResult
from loadkit.model_registry import ModelRegistry
from loadkit_layers import PPMissingLayer, make_layers

SHARED = {"model.embed_tokens.weight"}  # of a tied model: its first and its last stage read it


def write(folder: Path, *, layers: int = 3, **config: Any) -> dict[str, torch.Tensor]:
    """A toy Llama over two files; returns its tensors."""
    state = llama_sd(layers=layers, head=not config.get("tie_word_embeddings", False))
    write_cfg(folder, num_hidden_layers=layers, **config)
    write_shards(folder, state, 2)
    return state


def stages(pp: int) -> list[ParallelConfig]:
    return [ParallelConfig(pp_size=pp, pp_rank=rank) for rank in range(pp)]


def used(plan: LoadPlan) -> set[str]:
    return {row.tensor for row in plan.rows if row.tensor and row.kind != "skipped"}


def skipped(plan: LoadPlan) -> dict[str, str | None]:
    return {row.tensor: row.reason for row in plan.rows if row.tensor and row.kind == "skipped"}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("layers", "pp"), [(3, 2), (3, 3), (5, 3), (4, 2)])
def test_TP_05_the_stages_cover_the_checkpoint_once_but_for_what_they_share(
    tmp_path: Path, layers: int, pp: int, tied: bool
) -> None:
    state = write(tmp_path, layers=layers, tie_word_embeddings=tied)
    plans = [loadkit.plan(tmp_path, parallel=parallel) for parallel in stages(pp)]
    for plan in plans:
        assert plan.ok, plan.problems
        assert used(plan) | skipped(plan).keys() == state.keys()
        assert not used(plan) & skipped(plan).keys()
    every = [name for plan in plans for name in used(plan)]
    twice = {name for name in every if every.count(name) > 1}
    assert set(every) == state.keys()
    assert twice == (SHARED if tied else set())
    whole = sum(t.numel() * t.element_size() for t in state.values())
    shared = sum(state[name].numel() * state[name].element_size() for name in twice)
    assert sum(plan.bytes_needed for plan in plans) == whole + shared


def test_TP_05_what_is_skipped_says_which_stage_has_it(tmp_path: Path) -> None:
    write(tmp_path)
    first, last = (loadkit.plan(tmp_path, parallel=parallel) for parallel in stages(2))
    assert set(skipped(first)) == used(last)
    assert all("stage 1" in (why or "") for why in skipped(first).values()), skipped(first)
    assert all("stage 0" in (why or "") for why in skipped(last).values()), skipped(last)


@pytest.mark.parametrize("reader", ["pread", "mmap"])
def test_TP_05_bytes_of_other_stages_are_not_read(tmp_path: Path, reader: str) -> None:
    """The extents that the reader is handed are all that is ever read."""
    state = write(tmp_path)
    asked: list[tuple[str, int]] = []
    from loadkit.readers import mmap, pread

    reader_class: Any = {"pread": pread.PreadReader, "mmap": mmap.MmapReader}[reader]
    plain = reader_class.read

    def read(self: Any, extents: Any, *rest: Any, **more: Any) -> Any:
        listed = list(extents)
        asked.extend((e.tensor, e.rows * e.row_bytes) for e in listed)
        return plain(self, listed, *rest, **more)

    config = LoadConfig(reader=reader, alias="never")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader_class, "read", read)
        for parallel in stages(2):
            asked.clear()
            result = loadkit.load(tmp_path, parallel=parallel, load_config=config)
            own = used(result.plan)
            assert {name for name, _ in asked} == own
            expected = sum(state[name].numel() * 4 for name in own)
            assert sum(nbytes for _, nbytes in asked) == expected
            assert result.report.bytes_read == result.plan.bytes_to_read == expected


def test_TP_05_a_stage_misses_only_its_own_tensors(tmp_path: Path) -> None:
    state = write(tmp_path)
    del state["model.layers.2.mlp.up_proj.weight"], state["model.norm.weight"]
    for path in tmp_path.glob("*.safetensors*"):
        path.unlink()
    write_st(tmp_path / "model.safetensors", state)
    first, last = (loadkit.plan(tmp_path, parallel=parallel) for parallel in stages(2))
    assert first.ok
    found = {(p.code, p.parameter) for p in last.problems}
    assert found == {
        ("PARTLY_WRITTEN", "model.layers.2.mlp.gate_up_proj.weight"),
        ("MISSING", "model.norm.weight"),
    }
    with pytest.raises(PlanError):
        loadkit.load(tmp_path, parallel=stages(2)[1])


def test_TP_05_a_tensor_of_no_stage_is_unexpected_on_every_one(tmp_path: Path) -> None:
    state = {**llama_sd(layers=3), "model.layers.3.mlp.up_proj.weight": torch.ones(2)}
    write_cfg(tmp_path, num_hidden_layers=3)
    write_st(tmp_path / "model.safetensors", state)
    for parallel in stages(2):
        problems = loadkit.plan(tmp_path, parallel=parallel).problems
        assert [(p.code, p.tensor) for p in problems] == [
            ("UNEXPECTED_TENSOR", "model.layers.3.mlp.up_proj.weight")
        ]


def test_TP_05_stages_and_expert_ranks_together_cover_the_checkpoint(tmp_path: Path) -> None:
    """Two stages of two ranks that deal the experts: each expert and each layer where it lives."""
    config = FAMILIES["Qwen3MoeForCausalLM"]
    write_cfg(
        tmp_path, **config, architectures=["Qwen3MoeForCausalLM"], num_hidden_layers=3
    )  # fmt: skip
    loadkit.save(loadkit.load_model(tmp_path, load_format="dummy"), tmp_path)
    whole = used(loadkit.plan(tmp_path))
    plans = {}
    for rank in range(4):
        place = ParallelConfig.for_rank(rank, tp_size=2, pp_size=2, ep_size=2)
        plan = plans[place.pp_rank, place.ep_rank] = loadkit.plan(tmp_path, parallel=place)
        assert plan.ok, plan.problems
        assert used(plan) | skipped(plan).keys() == whole
        assert not used(plan) & skipped(plan).keys()
    for stage in range(2):
        left, right = (used(plans[stage, ep]) for ep in range(2))
        assert not any(".experts." in name for name in left & right)
        assert (left | right) == whole - set.union(*(used(plans[1 - stage, ep]) for ep in range(2)))


def test_a_tied_model_finds_its_table_under_the_heads_name_too(tmp_path: Path) -> None:
    state = llama_sd(layers=2, head=False)
    state["lm_head.weight"] = state.pop("model.embed_tokens.weight")
    write_cfg(tmp_path, tie_word_embeddings=True)
    write_st(tmp_path / "model.safetensors", state)
    for parallel in stages(2):
        model: Any = loadkit.load_model(tmp_path, parallel=parallel)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert torch.equal(model.lm_head.weight[:40], state["lm_head.weight"])


def chain(results: list[LoadResult], ids: torch.Tensor) -> torch.Tensor:
    """Logits ``[T, V]`` by one stage after the other, in this process."""
    between: Any = None
    for result in results:
        model: Any = result.model
        given = {} if between is None else {"intermediate_tensors": between}
        between = model(ids, torch.arange(len(ids)), **given)
    logits: torch.Tensor = model.compute_logits(between)
    return logits


FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"model_type": "mistral", "sliding_window": 4},
    "Qwen2ForCausalLM": {"model_type": "qwen2"},
    "Qwen3ForCausalLM": {"model_type": "qwen3", "head_dim": 4},
    "Qwen3MoeForCausalLM": {
        "model_type": "qwen3_moe", "head_dim": 4, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "Gemma3ForCausalLM": {
        "model_type": "gemma3_text", "head_dim": 4, "sliding_window": 4,
        "sliding_window_pattern": 2, "max_position_embeddings": 64, "tie_word_embeddings": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("architecture", FAMILIES)
def test_stages_in_a_row_compute_exactly_what_one_model_computes(
    tmp_path: Path, architecture: str
) -> None:
    config = {**FAMILIES[architecture], "architectures": [architecture], "num_hidden_layers": 3}
    write_cfg(tmp_path, **config)
    whole = loadkit.load(tmp_path, load_format="dummy")
    loadkit.save(whole.model, tmp_path)
    ids = torch.arange(9) * 4
    expected = chain([whole], ids)
    for pp in (2, 3):
        ranks = [loadkit.load(tmp_path, parallel=parallel) for parallel in stages(pp)]
        assert torch.equal(chain(ranks, ids), expected)
        named = [set(dict(rank.model.named_parameters())) for rank in ranks]
        assert set.union(*named) == set(dict(whole.model.named_parameters()))


@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_families_say_that_they_can_be_staged(architecture: str) -> None:
    assert supports_pp(ModelRegistry.resolve_model_cls([architecture])[0])


class OwnLoop(nn.Module, SupportsPP):
    """A model as others write them: its ``load_weights`` knows nothing of stages."""

    def __init__(self, *, config: LoadkitConfig, prefix: str = "") -> None:
        super().__init__()
        place = config.parallel_config
        _, _, self.layers = make_layers(3, lambda *, prefix: nn.Linear(2, 2), "layers", place)
        self.last = nn.Linear(2, 2) if place.pp_rank else PPMissingLayer("the last stage's")

    def forward(self, ids: torch.Tensor, intermediate_tensors: Any = None) -> torch.Tensor:
        return ids

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        params = dict(self.named_parameters())
        for name, tensor in weights:
            params[name].data.copy_(tensor)


def test_TP_05_a_loop_over_names_never_meets_another_stages_layers(tmp_path: Path) -> None:
    whole = [f"{layer}.{leaf}" for layer in ("layers.0", "layers.1", "layers.2", "last")
             for leaf in ("weight", "bias")]  # fmt: skip
    state = {name: torch.randn((2, 2) if "weight" in name else (2,)) for name in whole}
    write_cfg(tmp_path, architectures=["OwnLoop"])
    write_st(tmp_path / "model.safetensors", state)
    ModelRegistry.register_model("OwnLoop", OwnLoop, override=True)
    first, last = (loadkit.load(tmp_path, parallel=parallel) for parallel in stages(2))
    assert used(first.plan) == {name for name in whole if name[:8] in ("layers.0", "layers.1")}
    assert used(first.plan) | used(last.plan) == set(whole)
    assert not used(first.plan) & used(last.plan)
    assert skipped(first.plan)["last.bias"] == "the last stage's"
    assert skipped(last.plan)["layers.0.bias"] == "layer of pipeline stage 0"
    for name, param in first.model.named_parameters():
        assert torch.equal(param, state[name])


def test_more_stages_than_layers_are_a_problem_that_names_the_legal_sizes(tmp_path: Path) -> None:
    write(tmp_path, layers=3)
    plan = loadkit.plan(tmp_path, parallel=ParallelConfig(pp_size=4))
    assert [p.code for p in plan.problems] == ["PP_INDIVISIBLE"]
    assert plan.problems[0].hint == "pp sizes that fit: 1 to 3"
    with pytest.raises(ModelError) as caught:
        loadkit.load(tmp_path, parallel=ParallelConfig(pp_size=4))
    assert caught.value.detail["legal"] == [1, 2, 3]


def test_a_model_without_stages_is_a_problem_at_pp_2(tmp_path: Path) -> None:
    write_cfg(tmp_path, architectures=["BertModel"], type_vocab_size=2, max_position_embeddings=16)
    write_st(tmp_path / "model.safetensors", {"x": torch.ones(1)})
    plan = loadkit.plan(tmp_path, parallel=ParallelConfig(pp_size=2))
    assert [p.code for p in plan.problems] == ["PP_UNSUPPORTED"]
    assert "BertModel" in plan.problems[0].message


def test_stages_refuse_what_belongs_to_another(tmp_path: Path) -> None:
    write(tmp_path)
    first, last = (loadkit.load_model(tmp_path, parallel=parallel) for parallel in stages(2))
    ids = torch.arange(3)
    between = first(ids, ids)
    with pytest.raises(UsageError, match="needs intermediate_tensors"):
        last(ids, ids)
    with pytest.raises(UsageError, match="first pipeline stage takes token ids"):
        first(None, ids, between)
    with pytest.raises(UsageError, match="last pipeline stage"):
        first.compute_logits(between["hidden_states"])  # type: ignore[operator]
    with pytest.raises(ModelError, match="give its place"):
        greedy(first, [1, 2], max_new_tokens=1)


def test_one_stage_is_not_saved_as_a_checkpoint(tmp_path: Path) -> None:
    write(tmp_path / "model")
    result = loadkit.load(tmp_path / "model", parallel=stages(2)[1])
    assert result.report.to_dict()["parallel"]["pp_rank"] == 1
    with pytest.raises(UsageError) as caught:
        loadkit.save(result.model, tmp_path / "copy")
    assert caught.value.code == "PARTIAL_MODEL"
    assert "pp 2" in caught.value.message
    assert not (tmp_path / "copy").exists()


def test_what_is_below_a_missing_layer_may_have_any_name(tmp_path: Path) -> None:
    """Whose a tensor is is decided by the module it is for, before any parameter is looked at."""
    state = {**llama_sd(layers=3), "model.layers.2.who.knows.weight": torch.ones(2)}
    write_cfg(tmp_path, num_hidden_layers=3)
    write_st(tmp_path / "model.safetensors", state)
    first, last = (loadkit.plan(tmp_path, parallel=parallel) for parallel in stages(2))
    assert first.ok
    assert [p.code for p in last.problems] == ["UNEXPECTED_TENSOR"]
