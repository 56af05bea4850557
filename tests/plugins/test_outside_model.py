"""A model by someone who never heard of lazy tensors: installed, found, traced, read in part.

The distribution in tests/fixtures/vllm_style is built and installed as any would be. The truth is
its own loaders on real tensors.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import loadkit
from loadkit.config import LoadkitConfig, ModelConfig, ParallelConfig

# What a rank does not cut: it reads these whole.
REPLICATED = ("norm.weight", "residual_scale", "layernorm.weight")


@pytest.fixture(scope="session")
def installed(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The fixture distribution, installed into a folder on sys.path."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--no-build-isolation", "--disable-pip-version-check", "--target", str(target)]
    command += [str(root / "tests/fixtures/vllm_style")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sys.path.insert(0, str(target))
    importlib.invalidate_caches()
    yield target
    sys.path.remove(str(target))


@pytest.fixture(scope="session")
def checkpoint(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from outside_model.checkpoint import make_checkpoint  # type: ignore[import-not-found]

    folder = tmp_path_factory.mktemp("outside")
    make_checkpoint(folder)
    return folder


def parallel(rank: int, size: int) -> ParallelConfig:
    return ParallelConfig(tp_size=size, tp_rank=rank)


def reference(checkpoint: Path, rank: int, size: int) -> torch.nn.Module:
    """The model with real parameters, filled by its own loaders from real tensors."""
    from outside_model.checkpoint import make_state_dict
    from outside_model.model import OutsideForCausalLM  # type: ignore[import-not-found]

    values = json.loads((checkpoint / "config.json").read_text())
    config = LoadkitConfig(
        model_config=ModelConfig.from_dict(values), parallel_config=parallel(rank, size)
    )
    model: torch.nn.Module = OutsideForCausalLM(vllm_config=config)
    loaded = model.load_weights(make_state_dict().items())  # type: ignore[operator]
    assert loaded == {name for name, _ in model.named_parameters()}
    return model


RANKS = [
    pytest.param(rank, size, id=f"{rank}of{size}") for size in (1, 2, 4) for rank in range(size)
]


@pytest.mark.parametrize(("rank", "size"), RANKS)
def test_its_own_loaders_give_the_same_on_lazy_tensors(
    checkpoint: Path, rank: int, size: int
) -> None:
    expected = reference(checkpoint, rank, size).state_dict()
    result = loadkit.load(checkpoint, parallel=parallel(rank, size))
    found = result.model.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if name.endswith("mixer.A"):
            # exp of another length may take another kernel: 2 ulp
            torch.testing.assert_close(found[name], value, rtol=3e-7, atol=0)
        else:
            assert torch.equal(found[name], value), name


def test_the_ranks_join_to_the_checkpoint(checkpoint: Path) -> None:
    from outside_model.checkpoint import make_state_dict

    state = make_state_dict()
    parts = [
        loadkit.load(checkpoint, parallel=parallel(rank, 2)).model.state_dict() for rank in range(2)
    ]
    embedding = torch.cat([part["model.embed_tokens.weight"] for part in parts])
    assert torch.equal(embedding[:100], state["model.embed_tokens.weight"])
    assert not embedding[100:].any()
    assert embedding.shape == (128, 32)
    at = "model.layers.1."
    down = torch.cat([part[at + "mlp.down_proj.weight"] for part in parts], dim=1)
    assert torch.equal(down, state[at + "mlp.down_proj.weight"])
    in_conv = torch.cat([part[at + "mixer.conv"][:4] for part in parts])
    assert torch.equal(in_conv, state[at + "mixer.in_conv"])
    for part in parts:
        assert torch.equal(part[at + "residual_scale"], 1 + state[at + "residual_scale"])


def test_it_speaks_the_same(checkpoint: Path) -> None:
    ids = torch.tensor([3, 14, 15, 92])
    expected, found = reference(checkpoint, 0, 1), loadkit.load_model(checkpoint)
    with torch.no_grad():
        hidden = found(ids, torch.arange(4))
        torch.testing.assert_close(hidden, expected(ids, torch.arange(4)), rtol=1e-6, atol=1e-6)
        assert found.compute_logits(hidden).shape == (4, 100)


def rank_bytes(state: dict[str, torch.Tensor], rank: int) -> int:
    """The bytes that rank ``rank`` of 2 needs of a checkpoint, by what the model cuts."""
    total = 0
    for name, tensor in state.items():
        size = tensor.nbytes
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            total += size // 100 * (64 if rank == 0 else 36)
        elif name.endswith(REPLICATED):
            total += size
        elif not name.endswith("inv_freq"):
            total += size // 2
    return total


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_two_reads_half_and_what_is_replicated(checkpoint: Path, rank: int) -> None:
    from outside_model.checkpoint import make_state_dict

    state = make_state_dict()
    plan = loadkit.plan(checkpoint, parallel=parallel(rank, 2))
    assert plan.ok, plan.problems
    result = loadkit.load(checkpoint, parallel=parallel(rank, 2))
    assert plan.bytes_needed == result.report.bytes_needed == rank_bytes(state, rank)
    assert plan.bytes_to_read == result.report.bytes_read
    whole = sum(tensor.nbytes for tensor in state.values())
    assert result.report.bytes_needed < 0.6 * whole
    assert result.report.bytes_read < 0.75 * whole


def test_the_plan_is_exact_and_lists_what_is_left_out(checkpoint: Path) -> None:
    values: dict[str, Any] = loadkit.plan(checkpoint, parallel=parallel(0, 2)).to_dict()
    assert values["ok"]
    assert values["architecture"] == "OutsideForCausalLM"
    assert values["distribution"] == "outside-model"
    assert {row["exact"] for row in values["rows"] if row["kind"] != "skipped"} == {"exact"}
    from outside_model.checkpoint import make_state_dict

    skipped = {row["tensor"] for row in values["rows"] if row["kind"] == "skipped"}
    assert skipped == {name for name in make_state_dict() if name.endswith("inv_freq")}
    assert {row["tensor"] for row in values["rows"] if row["tensor"]} == set(make_state_dict())


def test_a_misshapen_tensor_is_a_problem_that_names_everything(
    checkpoint: Path, tmp_path: Path
) -> None:
    from outside_model.checkpoint import make_checkpoint
    from safetensors.torch import save_file

    state = make_checkpoint(tmp_path)
    state["model.layers.1.mixer.gate"] = torch.zeros(7, 32)
    save_file(state, tmp_path / "model.safetensors")
    plan = loadkit.plan(tmp_path, parallel=parallel(0, 2))
    assert not plan.ok
    assert any("gate" in str(problem.message) for problem in plan.problems)
