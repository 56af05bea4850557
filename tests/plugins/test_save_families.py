"""A saved folder is a checkpoint that transformers loads: no key missing, the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import loadkit
from helpers.saving import read, same

transformers = pytest.importorskip(
    "transformers", reason="the oracle of these tests, in the development requirements"
)

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
IDS = torch.tensor([3, 14, 15, 92, 65, 35])
# family -> (its config's class, its model's class, what is special in the config)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "llama_tied": ("LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama_biases": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"attention_bias": True, "mlp_bias": True},
    ),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 4}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 8}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"head_dim": 8}),
    "bert": ("BertConfig", "BertModel", {}),
}


def reference(family: str, folder: Path) -> Any:
    """transformers' random model of a family, saved by transformers."""
    config, model, special = FAMILIES[family]
    made = getattr(transformers, model)(getattr(transformers, config)(**{**SIZES, **special}))
    generator = torch.Generator().manual_seed(len(family))
    for param in made.parameters():
        param.data += 0.1 * torch.randn(param.shape, generator=generator)
    made.eval().save_pretrained(folder)
    return made


def theirs(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        out = model(IDS[None])
    found: torch.Tensor = (out.logits if hasattr(out, "logits") else out.last_hidden_state)[0]
    return found


def ours(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        hidden: torch.Tensor = model(IDS, torch.arange(len(IDS)))
        return model.compute_logits(hidden) if hasattr(model, "compute_logits") else hidden


@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 8_000], ids=["one_file", "sharded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_what_was_saved(family: str, shard_bytes: int, tmp_path: Path) -> None:
    before = reference(family, tmp_path / "a")
    model = loadkit.load_model(tmp_path / "a")
    loadkit.save(model, tmp_path / "b", max_shard_bytes=shard_bytes)
    same(read(tmp_path / "b"), read(tmp_path / "a"))
    after, info = type(before).from_pretrained(tmp_path / "b", output_loading_info=True)
    assert {kind: names for kind, names in info.items() if names} == {}
    assert torch.equal(theirs(after.eval()), theirs(before))
    again = loadkit.load_model(tmp_path / "b")
    assert torch.equal(ours(again), ours(model))
    # float32 against float32: sums in another order
    torch.testing.assert_close(ours(again), theirs(after), rtol=0, atol=1e-5)
    assert (tmp_path / "b/generation_config.json").exists() == (
        (tmp_path / "a/generation_config.json").exists()
    )


def test_a_model_of_transformers_can_be_filled_and_saved(tmp_path: Path) -> None:
    before = reference("qwen2", tmp_path / "a")
    config = transformers.Qwen2Config(**SIZES)
    model = transformers.Qwen2ForCausalLM(config)
    loadkit.load_into(model, tmp_path / "a")
    loadkit.save(model, tmp_path / "b")
    after, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "b", output_loading_info=True
    )
    assert {kind: names for kind, names in info.items() if names} == {}
    assert torch.equal(theirs(after.eval()), theirs(before))
