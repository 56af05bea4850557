"""``load_into`` over real ranks: tensor parallelism, ``fully_shard``, and both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.mesh_jobs import COMPUTING, IDS, LAYOUTS, Net
from loadkit.config import ParallelConfig
from loadkit.launch import run_ranks

WORLD = [ParallelConfig.for_rank(rank, tp_size=4) for rank in range(4)]
CASES = [f"{name}, {made_on}" for name in LAYOUTS for made_on in ("meta", "cpu")]
Tensors = dict[str, torch.Tensor]


def checkpoint(path: Path, seed: int) -> Tensors:
    """Random tensors for a ``Net``, written to a file."""
    made = torch.Generator().manual_seed(seed)
    state = {
        name: torch.randn(param.shape, generator=made)
        for name, param in Net().named_parameters()  # the tied one once
    }
    save_file(state, path)
    return state


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tensors, Tensors, list[dict[str, Any]]]:
    """Two checkpoints, and what each of four ranks found."""
    folder = tmp_path_factory.mktemp("mesh")
    paths = [folder / "first.safetensors", folder / "second.safetensors"]
    first, second = (checkpoint(path, seed) for seed, path in enumerate(paths))
    arguments = {"first": str(paths[0]), "second": str(paths[1])}
    return first, second, run_ranks("helpers.mesh_jobs:mesh_job", arguments, WORLD)


@pytest.mark.parametrize("case", CASES)
def test_what_all_ranks_hold_together_is_the_checkpoint(case: str, ran: Any) -> None:
    first, _, ranks = ran
    for rank in ranks:
        gathered = rank[case]["first"]
        assert gathered.keys() == first.keys()
        for name, tensor in gathered.items():
            assert torch.equal(tensor, first[name]), name
        assert rank[case]["tied"]


@pytest.mark.parametrize("case", CASES)
def test_a_rank_reads_the_bytes_of_its_local_parts(case: str, ran: Any) -> None:
    first, _, ranks = ran
    whole = sum(tensor.numel() * 4 for tensor in first.values())
    for rank in ranks:
        found = rank[case]["bytes"]
        assert found["needed"] == found["local"] < whole
        assert found["planned"] == found["read"]
        if "tp" not in case:  # of columns that are as narrow as here, what lies between is read too
            assert found["read"] == found["needed"]
        assert rank[case]["exact"] == {"exact"}
    if case.startswith("fsdp,"):  # every element on one rank
        assert sum(rank[case]["bytes"]["read"] for rank in ranks) == whole


@pytest.mark.parametrize("case", [case for case in CASES if case.split(",")[0] in COMPUTING])
def test_the_module_computes_with_what_was_loaded(case: str, ran: Any) -> None:
    first, _, ranks = ran
    reference = Net()
    reference.load_state_dict({**first, "head.weight": first["emb.weight"]})
    with torch.no_grad():
        expected = reference(IDS)
    for rank in ranks:
        # float32; tensor parallelism adds in another order
        torch.testing.assert_close(rank[case]["logits"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_a_module_that_has_computed_takes_another_checkpoint(case: str, ran: Any) -> None:
    _, second, ranks = ran
    for rank in ranks:
        for name, tensor in rank[case]["second"].items():
            assert torch.equal(tensor, second[name]), name


@pytest.mark.slow
def test_a_hugging_face_model_over_fsdp_and_tp(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="its models are what is loaded")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=99, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    with torch.no_grad():
        expected = model(IDS[None]).logits[0]
    arguments = {"folder": str(tmp_path)}
    for rank in run_ranks("helpers.mesh_jobs:hugging_face_job", arguments, WORLD):
        assert rank["bytes"]["needed"] == rank["bytes"]["local"]
        assert rank["bytes"]["planned"] == rank["bytes"]["read"]
        assert rank["first"].keys() == stored.keys()
        for name, tensor in rank["first"].items():
            assert torch.equal(tensor, stored[name]), name
        # float32; tensor parallelism adds in another order
        torch.testing.assert_close(rank["logits"], expected, rtol=1e-5, atol=1e-5)
