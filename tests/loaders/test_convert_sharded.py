"""Converting to the files of ranks, and back: every rank is what a load of the source gives it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import loadkit
from helpers.checkpoints import write_llama, write_st
from helpers.gguf_files import lone_llama
from helpers.saving import Tensors, read, same
from helpers.tiny_families import write_family
from loadkit.config import ParallelConfig
from loadkit.errors import ModelError, OptionError, PlanError, UsageError
from loadkit.manifest import parse_manifest


def parameters(folder: Path, parallel: ParallelConfig, **options: Any) -> Tensors:
    model = loadkit.load_model(folder, parallel=parallel, **options)
    return {name: p.data.contiguous() for name, p in model.named_parameters()}


def check_ranks(source: Path, target: Path, **sizes: int) -> None:
    """Each rank of the target holds what a load of the source gives it."""
    named = {f"{axis}_size": size for axis, size in sizes.items()}
    world = ParallelConfig(**named).world_size  # type: ignore[arg-type]
    for rank in range(world):
        parallel = ParallelConfig.for_rank(rank, **named)  # type: ignore[arg-type]
        same(parameters(target, parallel), parameters(source, parallel))


@pytest.mark.parametrize("sizes", [{"tp": 1}, {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_every_rank_is_what_a_load_gives_it(tmp_path: Path, sizes: dict[str, int]) -> None:
    state = write_llama(tmp_path / "a", vocab=100)
    report = loadkit.convert(tmp_path / "a", tmp_path / "b", to="sharded_state", **sizes)
    check_ranks(tmp_path / "a", tmp_path / "b", **sizes)
    assert report.topology == {"tp": 1, "pp": 1, "ep": 1, **sizes}
    whole = loadkit.diff(tmp_path / "a", tmp_path / "b")
    assert (whole.equal, whole.compared) == (True, len(state))
    assert loadkit.verify(tmp_path / "b", against=tmp_path / "a", finite=True).ok
    loadkit.convert(tmp_path / "b", tmp_path / "c")
    same(read(tmp_path / "c"), state)
    assert json.loads((tmp_path / "c/config.json").read_text()) == json.loads(
        (tmp_path / "a/config.json").read_text()
    )


def test_the_report_tells_what_no_rank_has_and_counts_tensors_once(tmp_path: Path) -> None:
    """Each rank skips what others hold: that is in the target all the same."""
    state = write_llama(tmp_path / "a", vocab=41)
    extra = "model.layers.1.self_attn.rotary_emb.inv_freq"
    write_st(tmp_path / "a/model.safetensors", {**state, extra: torch.ones(2)})
    report = loadkit.convert(
        tmp_path / "a", tmp_path / "b", to="sharded_state", tp=2, pp=2, dtype="bfloat16"
    )
    assert list(report.skipped) == [extra]
    assert report.casts == [{"from": "float32", "to": "bfloat16", "tensors": len(state)}]


def test_it_writes_what_the_ranks_themselves_save(tmp_path: Path) -> None:
    write_llama(tmp_path / "a", head=False)
    loadkit.convert(tmp_path / "a", tmp_path / "b", to="sharded_state", tp=2, max_shard_bytes=3_000)
    for rank in range(2):
        parallel = ParallelConfig(tp_size=2, tp_rank=rank)
        model = loadkit.load_model(tmp_path / "a", parallel=parallel)
        loadkit.save(model, tmp_path / "c", save_format="sharded_state", max_shard_bytes=3_000)
    names = sorted(path.name for path in (tmp_path / "c").iterdir())
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == names
    for name in names:
        one, two = ((tmp_path / x / name).read_bytes() for x in "bc")
        if name == "loadkit_manifest.json":
            assert parse_manifest(one) == parse_manifest(two)
        else:
            assert one == two, name
    assert any("part-3" in name for name in names)


PLACES = {"tp": 2, "ep": 2}


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3", "bert", "llama_tied"])
def test_every_family_goes_to_ranks_and_back(tmp_path: Path, family: str) -> None:
    write_family(tmp_path / "a", family)
    sizes = PLACES if family == "qwen3_moe" else {"tp": 2}
    loadkit.convert(tmp_path / "a", tmp_path / "b", to="sharded_state", **sizes)
    check_ranks(tmp_path / "a", tmp_path / "b", **sizes)
    loadkit.convert(tmp_path / "b", tmp_path / "c")
    loadkit.convert(tmp_path / "a", tmp_path / "d")
    same(read(tmp_path / "c"), read(tmp_path / "d"))
    found = loadkit.diff(tmp_path / "a", tmp_path / "c")
    assert not found.different
    assert not found.only_in_b
    assert set(found.only_in_a) <= {"embeddings.position_ids"}


def test_another_topology_is_made_of_the_first(tmp_path: Path) -> None:
    state = write_llama(tmp_path / "a", kv_heads=4)
    loadkit.convert(tmp_path / "a", tmp_path / "two", to="sharded_state", tp=2)
    loadkit.convert(tmp_path / "two", tmp_path / "four", to="sharded_state", tp=4)
    check_ranks(tmp_path / "a", tmp_path / "four", tp=4)
    assert loadkit.diff(tmp_path / "two", tmp_path / "four").equal
    loadkit.convert(tmp_path / "four", tmp_path / "b", dtype="bfloat16")
    same(read(tmp_path / "b"), {name: t.to(torch.bfloat16) for name, t in state.items()})


def test_a_gguf_becomes_ranks(tmp_path: Path) -> None:
    path = lone_llama(tmp_path / "model.gguf")
    loadkit.convert(path, tmp_path / "b", to="sharded_state", tp=2, dtype="float32")
    for rank in range(2):
        parallel = ParallelConfig(tp_size=2, tp_rank=rank)
        same(parameters(tmp_path / "b", parallel), parameters(path, parallel, dtype="float32"))
    assert loadkit.diff(path, tmp_path / "b", dtype="float32").equal


def test_a_cast_is_made_on_the_way(tmp_path: Path) -> None:
    write_llama(tmp_path / "a")
    loadkit.convert(tmp_path / "a", tmp_path / "b", to="sharded_state", tp=2, dtype="bfloat16")
    for rank in range(2):
        parallel = ParallelConfig(tp_size=2, tp_rank=rank)
        expected = parameters(tmp_path / "a", parallel, dtype="bfloat16")
        same(parameters(tmp_path / "b", parallel), expected)


def test_one_layout_takes_the_place_of_the_other(tmp_path: Path) -> None:
    write_llama(tmp_path / "a")
    loadkit.convert(tmp_path / "a", tmp_path / "b", to="sharded_state", tp=2)
    loadkit.convert(tmp_path / "a", tmp_path / "b", overwrite=True)
    assert not list((tmp_path / "b").glob("model-rank*"))
    loadkit.convert(tmp_path / "a", tmp_path / "b", to="sharded_state", overwrite=True)
    assert not (tmp_path / "b/model.safetensors").exists()
    assert loadkit.diff(tmp_path / "a", tmp_path / "b").equal


def test_a_rank_that_is_harmed_is_found_by_name(tmp_path: Path) -> None:
    write_llama(tmp_path / "a")
    loadkit.convert(tmp_path / "a", tmp_path / "b", to="sharded_state", tp=2)
    path = tmp_path / "b/model-rank-1-part-0.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    report = loadkit.verify(tmp_path / "b")
    assert [(p.code, p.file) for p in report.problems] == [("DIGEST", path.name)]
    assert report.problems[0].tensor is not None
    path.unlink()
    report = loadkit.verify(tmp_path / "b")
    assert "MISSING_FILE" in {problem.code for problem in report.problems}


def test_what_stands_against_any_rank_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    state = write_llama(tmp_path / "a")
    with pytest.raises(ModelError, match="tp") as caught:
        loadkit.convert(tmp_path / "a", tmp_path / "b", to="sharded_state", tp=3)
    assert caught.value.code == "TP_INDIVISIBLE"
    with pytest.raises(OptionError):
        loadkit.convert(tmp_path / "a", tmp_path / "b", to="sharded_state", ep=3)
    with pytest.raises(OptionError, match="names"):
        loadkit.convert(tmp_path / "a", tmp_path / "b", to="sharded_state", names="checkpoint")
    del state["model.layers.1.mlp.down_proj.weight"]
    write_st(tmp_path / "a/model.safetensors", state)
    with pytest.raises(PlanError) as missing:
        loadkit.convert(tmp_path / "a", tmp_path / "b", to="sharded_state", tp=2, pp=2)
    assert [problem.code for problem in missing.value.problems] == ["MISSING"]  # each once
    assert not (tmp_path / "b").exists()
    with pytest.raises(UsageError):
        loadkit.convert(tmp_path / "a", tmp_path / "b", to="sharded_state", tp=0)
