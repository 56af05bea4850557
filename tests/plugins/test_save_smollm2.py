"""SmolLM2 out of its GGUF file becomes a safetensors checkpoint with the same numbers.

Measured: 0.0 between all logits of loadkit's model, of what it saved and loaded again, and of
transformers' model of that folder, in float32, on one, two and four threads.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import loadkit
from helpers.saving import same_models
from loadkit.config import LoadConfig

pytestmark = pytest.mark.slow

QUIET = LoadConfig(use_tqdm_on_load=False)
TENSORS, BYTES = 272, 538_060_032


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Any:
    return loadkit.load_model(str(smollm2), dtype="float32", load_config=QUIET)


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What was saved: half a gigabyte, so it does not stay."""
    folder = tmp_path_factory.mktemp("smollm2") / "saved"
    report = loadkit.save(model, folder)
    assert (report.tensors, report.total_size) == (TENSORS, BYTES)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def before(model: Any, root: Path) -> list[tuple[list[int], torch.Tensor]]:
    """The oracle's prompts, and the first with what was said after it; the logits of all."""
    oracle = json.loads((root / "tests/data/smollm2-135m-dequant-f32.llamacpp.json").read_text())
    prompts = oracle["prompts"]
    texts = [prompt["prompt_ids"] for prompt in prompts.values()]
    texts.append(prompts["p1"]["prompt_ids"] + prompts["p1"]["greedy24_ids"])
    return [(ids, ours(model, ids)) for ids in texts]


def ours(model: Any, ids: list[int]) -> torch.Tensor:
    """Token ids [T] to logits [T, V]."""
    with torch.inference_mode():
        hidden = model(torch.tensor(ids), torch.arange(len(ids)))
        logits: torch.Tensor = model.compute_logits(hidden)
    return logits


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    """No logit differs by anything."""
    assert found.dtype == expected.dtype == torch.float32
    assert found.shape == expected.shape and found.shape[-1] == 49_152
    assert (found - expected).abs().max().item() == 0.0


def test_the_folder_is_one_of_hugging_faces(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["model_type"] == "llama"
    assert (config["dtype"], config["tie_word_embeddings"]) == ("float32", True)
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert len(names) == TENSORS and "lm_head.weight" not in names
    assert {"model.layers.29.self_attn.q_proj.weight", "model.norm.weight"} <= names


def test_what_is_loaded_again_has_the_same_logits(
    model: Any, folder: Path, before: list[tuple[list[int], torch.Tensor]]
) -> None:
    again = loadkit.load_model(folder, load_config=QUIET)
    same_models(again, model)
    for ids, logits in before:
        check(ours(again, ids), logits)


def test_transformers_loads_it_and_has_the_same_logits(
    folder: Path, before: list[tuple[list[int], torch.Tensor]]
) -> None:
    transformers = pytest.importorskip("transformers", reason="the oracle of this test")
    made, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    made.eval()
    assert {kind: names for kind, names in info.items() if names} == {}
    for ids, logits in before:
        with torch.inference_mode():
            check(made(torch.tensor([ids])).logits[0], logits)
