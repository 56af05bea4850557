"""A saved model is the checkpoint it was loaded from: names, bytes, config, and it loads again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import loadkit
from helpers.checkpoints import llama_sd, write_cfg, write_llama, write_shards, write_st
from helpers.families import build, fused
from helpers.saving import Tensors, read, same, same_models
from loadkit.config import ModelConfig
from loadkit.errors import UsageError


def with_biases(folder: Path, architecture: str, **config: Any) -> Tensors:
    """A Llama-like folder with biases on q, k and v (and o where the family has one)."""
    state = write_llama(folder, architectures=[architecture], **config)
    made = torch.Generator().manual_seed(5)
    parts = {"q": 16, "k": 8, "v": 8} | ({"o": 16} if "attention_bias" in config else {})
    for layer in range(2):
        for part, size in parts.items():
            name = f"model.layers.{layer}.self_attn.{part}_proj.bias"
            state[name] = torch.randn(size, generator=made)
    write_st(folder / "model.safetensors", state)
    return state


def test_what_is_saved_is_what_was_loaded(tmp_path: Path) -> None:
    state = write_llama(tmp_path / "a", vocab=100)  # padded to 128 rows in memory
    model = loadkit.load_model(tmp_path / "a")
    report = loadkit.save(model, tmp_path / "b")
    same(read(tmp_path / "b"), state)
    same_models(loadkit.load_model(tmp_path / "b"), model)
    assert report.files == ("model.safetensors",)
    assert report.tensors == len(state)
    assert report.total_size == sum(t.nbytes for t in state.values())
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    before, after = (json.loads((tmp_path / x / "config.json").read_text()) for x in "ab")
    assert after == before


def test_a_checkpoint_fused_on_disk_is_saved_under_the_usual_names(tmp_path: Path) -> None:
    state = write_llama(tmp_path / "a")
    write_st(tmp_path / "a/model.safetensors", fused(state))
    model = loadkit.load_model(tmp_path / "a")
    loadkit.save(model, tmp_path / "b")
    same(read(tmp_path / "b"), state)
    same_models(loadkit.load_model(tmp_path / "b"), model)


def test_a_tied_head_is_written_once_and_tied_again(tmp_path: Path) -> None:
    state = write_llama(tmp_path / "a", head=False)
    model = loadkit.load_model(tmp_path / "a")
    report = loadkit.save(model, tmp_path / "b")
    same(read(tmp_path / "b"), state)
    assert report.ties == {"model.embed_tokens.weight": ["lm_head.weight"]}
    again = loadkit.load_model(tmp_path / "b")
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_a_tie_that_the_config_does_not_speak_of_is_stated(tmp_path: Path) -> None:
    write_cfg(tmp_path / "a", drop=["tie_word_embeddings"])
    state = llama_sd()
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    write_st(tmp_path / "a/model.safetensors", state)
    model = loadkit.load_model(tmp_path / "a", hf_overrides={"tie_word_embeddings": True})
    loadkit.save(model, tmp_path / "b")
    assert json.loads((tmp_path / "b/config.json").read_text())["tie_word_embeddings"] is True
    assert "lm_head.weight" not in read(tmp_path / "b")
    model = loadkit.load_model(tmp_path / "a")
    model.lm_head.tie_weights(model.model.embed_tokens)
    loadkit.save(model, tmp_path / "c")
    assert json.loads((tmp_path / "c/config.json").read_text())["tie_word_embeddings"] is True
    # A config that denies it is believed: then both names are written.
    loadkit.save(model, tmp_path / "d", config={"tie_word_embeddings": False})
    same(read(tmp_path / "d"), state)


@pytest.mark.parametrize(
    ("architecture", "config"),
    [("LlamaForCausalLM", {"attention_bias": True}), ("Qwen2ForCausalLM", {})],
)
def test_biases_are_split_like_their_weights(
    tmp_path: Path, architecture: str, config: dict[str, Any]
) -> None:
    state = with_biases(tmp_path / "a", architecture, **config)
    model = loadkit.load_model(tmp_path / "a")
    loadkit.save(model, tmp_path / "b")
    same(read(tmp_path / "b"), state)
    same_models(loadkit.load_model(tmp_path / "b"), model)


def test_a_cast_model_is_saved_in_its_own_dtype(tmp_path: Path) -> None:
    state = write_llama(tmp_path / "a", dtype=torch.float32)
    model = loadkit.load_model(tmp_path / "a", dtype="bfloat16")
    loadkit.save(model, tmp_path / "b")
    same(read(tmp_path / "b"), {name: t.to(torch.bfloat16) for name, t in state.items()})
    assert json.loads((tmp_path / "b/config.json").read_text())["torch_dtype"] == "bfloat16"
    same_models(loadkit.load_model(tmp_path / "b"), model)


def test_old_spellings_are_saved_as_the_new_ones(tmp_path: Path) -> None:
    config = {
        "architectures": ["BertModel"],
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "vocab_size": 40,
        "max_position_embeddings": 12,
        "torch_dtype": "float32",
    }
    made = torch.Generator().manual_seed(0)
    model = build("loadkit_models.bert:BertModel", config)
    for param in model.parameters():
        param.data.copy_(torch.randn(param.shape, generator=made))
    loadkit.save(model, tmp_path / "a", config=config)
    state = read(tmp_path / "a")
    assert "encoder.layer.0.attention.self.query.weight" in state
    assert "embeddings.LayerNorm.weight" in state
    old = {
        f"bert.{name}".replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in state.items()
    }
    write_st(tmp_path / "a/model.safetensors", old)
    loadkit.save(loadkit.load_model(tmp_path / "a"), tmp_path / "b")
    same(read(tmp_path / "b"), state)


@pytest.mark.parametrize("prefix", ["", "backbone.", "model.model."])
def test_other_prefixes_are_saved_as_the_family_has_them(tmp_path: Path, prefix: str) -> None:
    state = write_llama(tmp_path / "a")
    renamed = {name.replace("model.", prefix, 1): t for name, t in state.items()}
    write_st(tmp_path / "a/model.safetensors", renamed)
    loadkit.save(loadkit.load_model(tmp_path / "a"), tmp_path / "b")
    same(read(tmp_path / "b"), state)


# -- files ---------------------------------------------------------------------------------------


def test_shards_are_no_larger_than_asked_and_fused_parts_lie_together(tmp_path: Path) -> None:
    state = write_llama(tmp_path / "a")
    model = loadkit.load_model(tmp_path / "a")
    report = loadkit.save(model, tmp_path / "b", max_shard_bytes=4096, metadata={"made": "here"})
    *shards, index = report.files
    assert index == "model.safetensors.index.json"
    assert shards == [
        f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)
    ]
    values = json.loads((tmp_path / "b" / index).read_text())
    assert values["metadata"]["total_size"] == sum(t.nbytes for t in state.values())
    assert list(values["weight_map"]) == sorted(state)
    for shard in shards:
        tensors = load_file(tmp_path / "b" / shard)
        assert sum(t.nbytes for t in tensors.values()) <= 4096
        assert {values["weight_map"][name] for name in tensors} == {shard}
        with safe_open(tmp_path / "b" / shard, "pt") as file:
            assert file.metadata() == {"format": "pt", "made": "here"}
        head = (tmp_path / "b" / shard).read_bytes()[:8]
        assert int.from_bytes(head, "little") % 8 == 0
    same(read(tmp_path / "b"), state)
    at = "model.layers.1.self_attn."
    files = {values["weight_map"][f"{at}{part}_proj.weight"] for part in "qkv"}
    assert len(files) == 1
    # Every fused parameter of the saved folder is a view of its file; here k o q v are not.
    again = loadkit.load(tmp_path / "b")
    padded = {"model.embed_tokens.weight", "lm_head.weight"}
    expected = sum(t.nbytes for name, t in state.items() if name not in padded)
    assert again.report.aliased_bytes == expected
    same_models(again.model, model)


def test_a_tensor_larger_than_a_shard_has_a_file_of_its_own(tmp_path: Path) -> None:
    state = write_llama(tmp_path / "a")
    model = loadkit.load_model(tmp_path / "a")
    report = loadkit.save(model, tmp_path / "b", max_shard_bytes=1)
    assert len(report.files) == len(state) + 1
    same(read(tmp_path / "b"), state)
    same_models(loadkit.load_model(tmp_path / "b"), model)


def test_mixed_dtypes_are_aligned(tmp_path: Path) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.ones(3, dtype=torch.bool), requires_grad=False)
            self.b = nn.Parameter(torch.arange(3, dtype=torch.float64))
            self.c = nn.Parameter(torch.arange(5, dtype=torch.bfloat16))
            self.d = nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn), requires_grad=False)
            self.e = nn.Parameter(torch.tensor(0.5))
            self.f = nn.Parameter(torch.zeros(2, 0, 3))
            self.g = nn.Parameter(torch.arange(24.0).view(2, 3, 4).transpose(0, 2))
            self.h = nn.Parameter(torch.arange(4, dtype=torch.float16).expand(3, 4))
            self.i = nn.Parameter(torch.tensor([1 + 2j]).conj(), requires_grad=False)

    model = Mixed()
    loadkit.save(model, tmp_path)
    same(
        read(tmp_path),
        {n: p.detach().clone().contiguous().resolve_conj() for n, p in model.named_parameters()},
    )


def test_the_sources_tokenizer_files_come_along(tmp_path: Path) -> None:
    write_llama(tmp_path / "a")
    (tmp_path / "a/1_Pooling").mkdir()
    for name in ("tokenizer.json", "generation_config.json", "1_Pooling/config.json"):
        (tmp_path / "a" / name).write_text(f'{{"I am": "{name}"}}')
    for name in ("optimizer.pt", "modeling_x.py", "README.md", "old.gguf"):
        (tmp_path / "a" / name).write_text("not for you")
    (tmp_path / "a/vocab.txt").symlink_to("/etc/hostname")
    report = loadkit.save(loadkit.load_model(tmp_path / "a"), tmp_path / "b")
    copied = {"1_Pooling/config.json", "generation_config.json", "tokenizer.json"}
    assert set(report.copied) == copied
    assert list(report.not_copied) == ["vocab.txt"]
    for name in copied:
        assert (tmp_path / "b" / name).read_bytes() == (tmp_path / "a" / name).read_bytes()
    assert len(list((tmp_path / "b").iterdir())) == 5


def test_a_source_that_is_gone_has_no_files_to_copy(tmp_path: Path) -> None:
    state = write_llama(tmp_path / "a")
    model = loadkit.load_model(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "moved")
    report = loadkit.save(model, tmp_path / "b")
    assert report.copied == ()
    assert list(report.not_copied) == [str(tmp_path / "a")]
    same(read(tmp_path / "b"), state)


# -- config.json ---------------------------------------------------------------------------------


def test_the_config_has_the_overrides_and_what_was_resolved(tmp_path: Path) -> None:
    config = {"rope_scaling": None, "text_config": {"dtype": "float16"}, "odd": float("inf")}
    write_llama(tmp_path / "a", architectures=["NobodyKnows"], **config)
    model = loadkit.load_model(
        tmp_path / "a",
        dtype="float16",
        architecture="LlamaForCausalLM",
        hf_overrides={"rms_norm_eps": 0.5},
    )
    loadkit.save(model, tmp_path / "b")
    values = json.loads((tmp_path / "b/config.json").read_text())
    before = json.loads((tmp_path / "a/config.json").read_text())
    assert values == {
        **before,
        "architectures": ["LlamaForCausalLM"],
        "torch_dtype": "float16",
        "rms_norm_eps": 0.5,
    }
    with pytest.raises(UsageError, match="JSON"):
        loadkit.save(model, tmp_path / "c", config={"a": object()})
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("kind", ["mapping", "ModelConfig", "HFConfig"])
def test_a_given_config_is_written(tmp_path: Path, kind: str) -> None:
    values = {"architectures": ["X"], "hidden_size": 3, "dtype": "float16"}
    config = {
        "mapping": values,
        "ModelConfig": ModelConfig.from_dict(values),
        "HFConfig": ModelConfig.from_dict(values).hf_config,
    }[kind]
    loadkit.save(nn.Linear(2, 3), tmp_path, config=config)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written == {**values, "dtype": "float32"}


def test_an_indexed_source_may_be_saved_over_with_one_file(tmp_path: Path) -> None:
    state = llama_sd()
    write_cfg(tmp_path)
    write_shards(tmp_path, state, 3)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/mine.txt").write_text("keep me")
    loadkit.save(loadkit.load_model(tmp_path), tmp_path)
    found = sorted(p.name for p in tmp_path.iterdir())
    assert found == ["config.json", "model.safetensors", "notes"]
    assert (tmp_path / "notes/mine.txt").read_text() == "keep me"
    same(read(tmp_path), state)
