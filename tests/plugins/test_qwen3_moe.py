"""Qwen3-MoE equals transformers, however it is stored and however its experts lie over ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import loadkit
from helpers.checkpoints import write_shards, write_st
from helpers.decoder_family import (
    SIZES,
    DecoderFamilyTests,
    checkpoint_of,
    stack_experts,
)
from helpers.families import Tensors
from helpers.saving import read
from loadkit import ExpertPlacement
from loadkit.config import ParallelConfig
from loadkit.errors import ConfigFileError

EXPERTS = 8
LINEAR, ROUND, REDUNDANT = (
    ExpertPlacement.linear(EXPERTS, 4),
    ExpertPlacement.round_robin(EXPERTS, 4),
    ExpertPlacement.linear(EXPERTS, 4, redundant=4),
)


def unstacked(weights: Tensors) -> Tensors:
    """The hub's layout, one tensor for each expert's gate, up and down, by hand."""
    out: Tensors = {}
    for name, value in weights.items():
        at, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj":
            for expert, both in enumerate(value):
                gate, up = both.chunk(2)
                out[f"{at}.{expert}.gate_proj.weight"] = gate.clone()
                out[f"{at}.{expert}.up_proj.weight"] = up.clone()
        elif leaf == "down_proj":
            out |= {f"{at}.{e}.down_proj.weight": one.clone() for e, one in enumerate(value)}
        else:
            out[name] = value
    return out


class TestQwen3Moe(DecoderFamilyTests):
    model = "loadkit_models.qwen3_moe:Qwen3MoeForCausalLM"
    oracle = ("Qwen3MoeConfig", "Qwen3MoeForCausalLM")
    sizes = {
        **SIZES,
        "head_dim": 6,
        "moe_intermediate_size": 24,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 3,
    }
    variants = {
        "plain": {"norm_topk_prob": True, "tie_word_embeddings": True},
        "some_dense": {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
        "window": {"use_sliding_window": True, "sliding_window": 3, "attention_bias": True},
    }
    joined = ("some_dense",)
    forms = {"unfused": dict, "stacked": stack_experts}
    layouts = {
        "ep4": {"tp_size": 4, "ep_size": 4},
        "ep2": {"tp_size": 4, "ep_size": 2},
        "round_robin": {"tp_size": 4, "ep_size": 4, "expert_placement": ROUND.to_dict()},
        "redundant": {"tp_size": 4, "ep_size": 4, "expert_placement": REDUNDANT.to_dict()},
    }

    @staticmethod
    def stored(reference: Any) -> Tensors:
        return unstacked(DecoderFamilyTests.stored(reference))


def checkpoint(folder: Path, variant: str = "plain", **changes: Any) -> tuple[Path, Tensors]:
    """A variant's checkpoint in the hub's layout, and its tensors."""
    reference = TestQwen3Moe.reference(variant)
    weights = TestQwen3Moe.stored(reference)
    config = {**reference.config.to_dict(), "architectures": ["Qwen3MoeForCausalLM"], **changes}
    (folder / "config.json").write_text(json.dumps(config))
    write_shards(folder, weights, 2)
    return folder, weights


@pytest.mark.parametrize(
    ("sizes", "placement"),
    [
        pytest.param({"tp_size": 2, "ep_size": 2}, None, id="ep2"),
        pytest.param({"tp_size": 4, "ep_size": 2}, None, id="tp4_ep2"),
        pytest.param({"tp_size": 4, "ep_size": 4}, LINEAR, id="ep4"),
        pytest.param({"tp_size": 4, "ep_size": 4}, ROUND, id="round_robin"),
        pytest.param({"tp_size": 4, "ep_size": 4}, REDUNDANT, id="redundant"),
        pytest.param(
            {"tp_size": 4, "ep_size": 4},
            ExpertPlacement((7, 7, 0, 2, 4, 6, 1, 3, 5, 0), 4),
            id="any_placement",
        ),
    ],
)
def test_every_placement_holds_the_checkpoint_and_reads_no_other_rank_s_experts(
    sizes: dict[str, int], placement: ExpertPlacement | None, tmp_path: Path
) -> None:
    folder, weights = checkpoint(tmp_path)
    models = []
    for rank in range(sizes["tp_size"]):
        parallel = ParallelConfig.for_rank(rank, **sizes, expert_placement=placement)
        result = loadkit.load(folder, parallel=parallel, dtype="float32")
        models.append(result.model)
        table = placement or ExpertPlacement.linear(EXPERTS, sizes["ep_size"])
        own = set(table.experts_of(parallel.ep_rank))
        found = {int(n.split(".experts.")[1].split(".")[0]) for n in skipped_experts(result.plan)}
        assert found == set(range(EXPERTS)) - own
        assert result.report.bytes_read == result.plan.bytes_to_read
    assert checkpoint_equals(models, weights)


def skipped_experts(plan: Any) -> list[str]:
    return [r.tensor for r in plan.rows if r.kind == "skipped" and "ep rank" in r.reason]


def checkpoint_equals(models: list[Any], weights: Tensors) -> bool:
    found = checkpoint_of(models)
    assert found.keys() == weights.keys()
    return all(torch.equal(found[name], value) for name, value in weights.items())


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"tp_size": 4, "ep_size": 2}], ids=["tp", "ep"])
def test_experts_stored_in_two_tensors_are_read_by_their_rows(
    sizes: dict[str, int], tmp_path: Path
) -> None:
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
    one_by_one, weights = checkpoint(tmp_path / "a")
    in_two = tmp_path / "b"
    (in_two / "config.json").write_bytes((one_by_one / "config.json").read_bytes())
    write_st(in_two / "model.safetensors", stack_experts(weights))
    for rank in range(sizes["tp_size"]):
        parallel = ParallelConfig.for_rank(rank, **sizes)
        a, b = (
            loadkit.load(folder, parallel=parallel, dtype="float32")
            for folder in (one_by_one, in_two)
        )
        assert a.plan.bytes_needed == b.plan.bytes_needed == b.plan.bytes_to_read
        assert all(row.exact == "exact" for row in b.plan.rows)
        for (name, mine), (other, theirs) in zip(
            a.model.named_parameters(), b.model.named_parameters(), strict=True
        ):
            assert name == other and torch.equal(mine, theirs)


def test_experts_stored_as_they_are_held_are_views_of_the_file(tmp_path: Path) -> None:
    folder, weights = checkpoint(tmp_path)
    for file in folder.glob("model*"):
        file.unlink()
    stacked = stack_experts(weights)
    write_st(folder / "model.safetensors", stacked)
    result = loadkit.load(folder, dtype="float32")
    experts = sum(t.nbytes for name, t in stacked.items() if ".experts." in name)
    for name, param in result.model.named_parameters():
        if ".experts." in name:
            rows = [row for row in result.plan.rows if row.parameter == name]
            shards = 2 if "w13" in name else 1
            assert len(rows) == EXPERTS * shards and param.is_contiguous()
    assert result.report.aliased_bytes >= experts


@pytest.mark.parametrize("placement", [LINEAR, ROUND, REDUNDANT], ids=["linear", "round", "more"])
def test_dummy_numbers_are_the_same_for_every_placement(
    placement: ExpertPlacement, tmp_path: Path
) -> None:
    folder, _ = checkpoint(tmp_path)
    options: Any = {"load_format": "dummy", "dtype": "float32"}
    whole = checkpoint_of([loadkit.load_model(folder, **options)])
    models = [
        loadkit.load_model(
            folder,
            parallel=ParallelConfig.for_rank(
                rank, tp_size=4, ep_size=4, expert_placement=placement
            ),
            **options,
        )
        for rank in range(4)
    ]
    assert checkpoint_equals(models, whole)


def test_the_config_s_two_names_for_the_number_of_experts(tmp_path: Path) -> None:
    folder, _ = checkpoint(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    number = config.pop("num_local_experts", None) or config.pop("num_experts")
    for name in ("num_experts", "num_local_experts"):
        (folder / "config.json").write_text(json.dumps({**config, name: number}))
        assert loadkit.plan(folder, dtype="float32").ok
    for wrong in ({"mlp_only_layers": 1}, {"mlp_only_layers": ["0"]}, {"decoder_sparse_step": 0},
                  {"num_experts": 0}, {"num_experts_per_tok": EXPERTS + 1}):  # fmt: skip
        broken = {**config, "num_experts": number, **wrong}
        (folder / "config.json").write_text(json.dumps(broken))
        with pytest.raises(ConfigFileError):
            loadkit.load(folder)


def test_saving_gives_the_hub_s_layout_back(tmp_path: Path) -> None:
    for place in ("a", "b", "c"):
        (tmp_path / place).mkdir()
    folder, weights = checkpoint(tmp_path / "a", "some_dense")
    loadkit.save(loadkit.load_model(folder), tmp_path / "saved")
    write_st(tmp_path / "b" / "model.safetensors", stack_experts(weights))
    (tmp_path / "b" / "config.json").write_bytes((folder / "config.json").read_bytes())
    loadkit.save(loadkit.load_model(tmp_path / "b"), tmp_path / "unstacked")
    for saved in ("saved", "unstacked"):
        found = read(tmp_path / saved)
        assert found.keys() == weights.keys()
        for name, value in weights.items():
            assert torch.equal(found[name], value), name


def test_what_transformers_saves_itself_is_loaded(tmp_path: Path) -> None:
    reference = TestQwen3Moe.reference("plain")
    reference.save_pretrained(tmp_path)
    model = loadkit.load_model(tmp_path, dtype="float32")
    assert checkpoint_equals([model], TestQwen3Moe.stored(reference))
