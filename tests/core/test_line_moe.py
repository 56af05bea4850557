"""Experts through the whole line: what a rank reads, what is missing, and scales of blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import loadkit
from helpers.block_fp8 import dequantised
from helpers.checkpoints import write_shards
from helpers.deepseek_shaped import (
    ARCHITECTURE,
    deepseek_config,
    deepseek_shaped,
    deepseek_shapes,
)
from loadkit import ExpertPlacement
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.errors import ModelError

Tensors = dict[str, torch.Tensor]
BLOCK = 8
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "vocab_size": 128,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
EXPERTS = 8
MOE = "model.layers.1.mlp.experts."


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with deepseek_shaped():
        yield


def config_of(block: int = BLOCK, **changes: Any) -> dict[str, Any]:
    config = deepseek_config(2, EXPERTS, **{**SIZES, **changes})
    config["quantization_config"] = {
        **config["quantization_config"],
        "weight_block_size": [block, block],
    }
    return config


def tensors_of(config: dict[str, Any]) -> Tensors:
    """Random numbers of every tensor's shape and dtype."""
    generator = torch.Generator().manual_seed(4)
    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}
    return {
        name: torch.randn(shape, generator=generator).to(dtypes[dtype])
        for name, (dtype, shape) in deepseek_shapes(config).items()
    }


def write(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    write_shards(folder, tensors, 3)
    return folder


def load(folder: Path, rank: int, **sizes: Any) -> Any:
    return loadkit.load(folder, parallel=ParallelConfig.for_rank(rank, **sizes))


def part_of(param: torch.Tensor, scale: torch.Tensor, rows: list[int]) -> list[torch.Tensor]:
    """The dequantised shards of one expert's fused weight."""
    scales = scale.split([-(-size // BLOCK) for size in rows])
    weights = param.split(rows)
    pairs = zip(weights, scales, strict=True)
    return [dequantised(w, s, (BLOCK, BLOCK)) for w, s in pairs]


# -- TP-04 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes",
    [{"tp_size": 1}, {"tp_size": 2}, {"tp_size": 4}, {"tp_size": 4, "ep_size": 2}],
    ids=["tp1", "tp2", "tp4", "tp4_ep2"],
)
def test_TP_04_dequantised_shards_of_every_rank_are_rows_of_the_dequantised_whole(
    sizes: dict[str, int], tmp_path: Path
) -> None:
    config = config_of()
    tensors = tensors_of(config)
    write(tmp_path, config, tensors)

    def full(name: str) -> torch.Tensor:
        scale = tensors[f"{name}.weight_scale_inv"]
        return dequantised(tensors[f"{name}.weight"], scale, (BLOCK, BLOCK))

    for rank in range(sizes["tp_size"]):
        model = load(tmp_path, rank, **sizes).model
        moe = model.model.layers[1].mlp.experts
        size = 32 // moe.tp_size
        assert size % BLOCK == 0
        cut = slice(moe.tp_rank * size, (moe.tp_rank + 1) * size)
        for slot, expert in enumerate(moe.ranks.placement.experts_of(moe.ranks.ep_rank)):
            gate, up = part_of(moe.w13_weight[slot], moe.w13_weight_scale_inv[slot], [size] * 2)
            (down,) = part_of(moe.w2_weight[slot], moe.w2_weight_scale_inv[slot], [32])
            assert torch.equal(gate, full(f"{MOE}{expert}.gate_proj")[cut])
            assert torch.equal(up, full(f"{MOE}{expert}.up_proj")[cut])
            assert torch.equal(down, full(f"{MOE}{expert}.down_proj")[:, cut])
        dense, R = model.model.layers[0].mlp.gate_up_proj, sizes["tp_size"]
        parts = part_of(dense.weight, dense.weight_scale_inv, [64 // R] * 2)
        for name, part in zip(("gate_proj", "up_proj"), parts, strict=True):
            own = slice(rank * 64 // R, (rank + 1) * 64 // R)
            assert torch.equal(part, full(f"model.layers.0.mlp.{name}")[own])


def test_TP_04_a_split_inside_a_block_is_refused_when_the_layer_is_made(tmp_path: Path) -> None:
    # The case's sizes: blocks of 4, 12 rows, 2 ranks: 6 rows each end inside a block.
    config = config_of(4, moe_intermediate_size=12, n_shared_experts=2)
    write(tmp_path, config, tensors_of(config))
    plan = loadkit.plan(tmp_path, parallel=ParallelConfig(tp_size=2))
    (problem,) = plan.problems
    assert problem.code == "TP_INDIVISIBLE"
    for said in ("model.layers.1.mlp.experts.w13_weight_scale_inv", "6 of 12", "block of 4"):
        assert said in problem.message
    assert problem.hint == "tp sizes that fit: 1, 3"
    with pytest.raises(ModelError):
        load(tmp_path, 0, tp_size=2)
    assert load(tmp_path, 1, tp_size=2, ep_size=2).plan.ok  # experts are dealt, and not cut


def test_TP_04_sizes_that_are_no_multiple_of_the_block_end_in_a_part_of_one(
    tmp_path: Path,
) -> None:
    config = config_of(BLOCK, moe_intermediate_size=20)  # 2.5 blocks
    tensors = tensors_of(config)
    moe = load(write(tmp_path, config, tensors), 0).model.model.layers[1].mlp.experts
    assert moe.w13_weight_scale_inv.shape == (EXPERTS, 3 + 3, 4)
    for expert in range(EXPERTS):
        parts = part_of(moe.w13_weight[expert], moe.w13_weight_scale_inv[expert], [20, 20])
        for name, part in zip(("gate_proj", "up_proj"), parts, strict=True):
            weight, scale = (
                tensors[f"{MOE}{expert}.{name}.{leaf}"] for leaf in ("weight", "weight_scale_inv")
            )
            assert torch.equal(part, dequantised(weight, scale, (BLOCK, BLOCK)))


# -- what is read --------------------------------------------------------------------------------


@pytest.mark.parametrize("alias", ["auto", "never"])
@pytest.mark.parametrize(
    "placement",
    [
        ExpertPlacement.linear(EXPERTS, 2),
        ExpertPlacement.round_robin(EXPERTS, 2),
        ExpertPlacement.linear(EXPERTS, 2, redundant=4),
    ],
    ids=["linear", "round_robin", "redundant"],
)
def test_a_rank_reads_its_own_experts_and_its_own_slices(
    placement: ExpertPlacement, alias: str, tmp_path: Path
) -> None:
    config = config_of()
    tensors = tensors_of(config)
    write(tmp_path, config, tensors)
    each = sum(t.nbytes for name, t in tensors.items() if name.startswith(f"{MOE}0."))
    found = []
    for rank in range(2):
        parallel = ParallelConfig.for_rank(rank, tp_size=2, ep_size=2, expert_placement=placement)
        loaded = loadkit.load(tmp_path, parallel=parallel, load_config=LoadConfig(alias=alias))
        assert loaded.report.bytes_read == loaded.plan.bytes_to_read
        own = len(placement.experts_of(rank))
        experts = {
            (r.tensor, r.source.offset, r.source.size)
            for r in loaded.plan.rows
            if r.kind == "expert"
        }
        assert len(experts) == own * 6
        assert all(r.exact == "exact" for r in loaded.plan.rows)
        found.append(loaded.plan.bytes_needed - own * each)
    assert found[0] == found[1]  # beside the experts the ranks need as much


def test_a_redundant_expert_of_one_rank_is_needed_once_and_in_both_slots(tmp_path: Path) -> None:
    config = config_of()
    tensors = tensors_of(config)
    write(tmp_path, config, tensors)
    plain = loadkit.plan(tmp_path)
    twice = ExpertPlacement((*range(EXPERTS), 5, 5), 1)
    loaded = loadkit.load(tmp_path, parallel=ParallelConfig(expert_placement=twice))
    each = sum(t.nbytes for name, t in tensors.items() if name.startswith(f"{MOE}5."))
    assert loaded.plan.bytes_needed == plain.bytes_needed
    assert loaded.plan.bytes_to_read == loaded.report.bytes_read == plain.bytes_to_read + 2 * each
    moe = loaded.model.model.layers[1].mlp.experts
    for param in moe.parameters():
        bits = param.view(torch.uint8)
        assert torch.equal(bits[8], bits[5]) and torch.equal(bits[9], bits[5])


def test_the_layer_that_predicts_further_tokens_is_left_out_with_a_reason(tmp_path: Path) -> None:
    config = config_of()
    tensors = tensors_of(config)
    plan = loadkit.plan(write(tmp_path, config, tensors))
    skipped = {r.tensor: r.reason for r in plan.rows if r.kind == "skipped"}
    assert skipped.keys() == {name for name in tensors if name.startswith("model.layers.2.")}
    assert set(skipped.values()) == {"a layer that predicts further tokens"}


# -- what is missing -----------------------------------------------------------------------------


def problems_of(folder: Path, tensors: Tensors, **options: Any) -> list[Any]:
    return list(loadkit.plan(write(folder, config_of(), tensors), **options).problems)


@pytest.mark.parametrize("leaf", ["weight", "weight_scale_inv"])
@pytest.mark.parametrize("projection", ["gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize("sizes", [{"tp_size": 1}, {"tp_size": 2}], ids=["tp1", "tp2"])
def test_a_missing_expert_tensor_is_one_problem_that_names_it(
    sizes: dict[str, int], projection: str, leaf: str, tmp_path: Path
) -> None:
    tensors = tensors_of(config_of())
    del tensors[f"{MOE}5.{projection}.{leaf}"]
    (problem,) = problems_of(tmp_path, tensors, parallel=ParallelConfig(**sizes))
    assert problem.code == "MISSING"
    assert f"expert 5 has no {projection}" in problem.message
    parameter = "w2" if projection == "down_proj" else "w13"
    assert problem.parameter == f"{MOE}{parameter}_{leaf}"


def test_only_the_ranks_that_need_it_miss_it(tmp_path: Path) -> None:
    tensors = tensors_of(config_of())
    del tensors[f"{MOE}5.up_proj.weight"]
    sizes = {"tp_size": 2, "ep_size": 2}
    first, second = (ParallelConfig.for_rank(rank, **sizes) for rank in range(2))
    assert problems_of(tmp_path, tensors, parallel=first) == []
    assert len(problems_of(tmp_path, tensors, parallel=second)) == 1


def test_several_missing_tensors_are_as_many_problems(tmp_path: Path) -> None:
    tensors = tensors_of(config_of())
    gone = [(2, "up_proj"), (3, "up_proj"), (6, "gate_proj")]
    for expert, projection in gone:
        del tensors[f"{MOE}{expert}.{projection}.weight"]
    found = [problem.message for problem in problems_of(tmp_path, tensors)]
    assert len(found) == len(gone)
    for expert, projection in gone:
        assert any(f"expert {expert} has no {projection}" in message for message in found)


def test_fewer_experts_than_the_config_says(tmp_path: Path) -> None:
    tensors = {
        name: value
        for name, value in tensors_of(config_of()).items()
        if not name.startswith((f"{MOE}6.", f"{MOE}7."))
    }
    found = problems_of(tmp_path, tensors)
    assert len(found) == 4  # one for each parameter of the layer
    for problem in found:
        assert "experts 6 to 7" in problem.message
        assert "the config has 8 experts, the checkpoint fewer" in problem.message


def test_more_experts_than_the_config_says(tmp_path: Path) -> None:
    tensors = tensors_of(config_of())
    for name in [name for name in tensors if name.startswith(f"{MOE}7.")]:
        tensors[name.replace(f"{MOE}7.", f"{MOE}8.")] = tensors[name].clone()
    found = problems_of(tmp_path, tensors)
    assert {problem.code for problem in found} == {"UNEXPECTED_TENSOR"}
    assert {p.tensor for p in found} == {n for n in tensors if n.startswith(f"{MOE}8.")}
    assert all("the config has 8 experts, 0 to 7" in problem.message for problem in found)


def test_the_model_of_these_tests_is_the_one_that_was_loaded(tmp_path: Path) -> None:
    config = config_of()
    assert loadkit.plan(write(tmp_path, config, tensors_of(config))).architecture == ARCHITECTURE
