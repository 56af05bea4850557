"""Converting a checkpoint: the same numbers under the names that were asked for, nothing half."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

import loadkit
from helpers.checkpoints import llama_sd, write_cfg, write_llama, write_shards, write_st
from helpers.families import fused
from helpers.gguf_files import lone_llama
from helpers.saving import Tensors, contents, read, same, same_models
from loadkit.conversion import outputs
from loadkit.errors import (
    ArchitectureError,
    ChangedError,
    IntegrityError,
    ModelError,
    OptionError,
    PlanError,
    UsageError,
    WriteError,
)
from loadkit.manifest import parse_manifest
from loadkit.model_registry import ModelRegistry


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_converted_model_is_the_one_that_a_save_writes(tmp_path: Path) -> None:
    write_llama(tmp_path / "a", vocab=100, shards=3)
    report = loadkit.convert(tmp_path / "a", tmp_path / "b")
    loadkit.save(loadkit.load_model(tmp_path / "a"), tmp_path / "c")
    found, saved = contents(tmp_path / "b"), contents(tmp_path / "c")
    manifest = parse_manifest(found.pop("loadkit_manifest.json"))
    assert found == saved
    assert (report.names, report.files) == ("model", ("model.safetensors",))
    assert report.tensors == 21
    assert report.total_size == (tmp_path / "b/model.safetensors").stat().st_size
    assert report.bytes_written == report.total_size
    assert manifest.layout == "checkpoint"
    assert manifest.architecture == "LlamaForCausalLM"
    assert len(manifest.files["model.safetensors"].tensors) == 21
    assert loadkit.verify(tmp_path / "b", finite=True, against=tmp_path / "a").ok


def test_names_fused_on_disk_become_the_usual_ones(tmp_path: Path) -> None:
    state = write_llama(tmp_path / "a")
    write_st(tmp_path / "a/model.safetensors", fused(state))
    loadkit.convert(tmp_path / "a", tmp_path / "b")
    same(read(tmp_path / "b"), state)


def test_files_are_of_the_size_asked_for_and_the_index_names_them(tmp_path: Path) -> None:
    state = write_llama(tmp_path / "a")
    report = loadkit.convert(tmp_path / "a", tmp_path / "b", max_shard_bytes=6_000)
    same(read(tmp_path / "b"), state)
    assert len(report.files) > 2
    index = json.loads((tmp_path / "b/model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(report.files)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in state.values())
    for file in report.files:
        with safe_open(tmp_path / "b" / file, "pt") as opened:
            sizes = [opened.get_tensor(name).nbytes for name in opened.keys()]  # noqa: SIM118
            assert sum(sizes) <= 6_000 or len(sizes) == 1
            assert opened.metadata() == {"format": "pt"}
    same_models(loadkit.load_model(tmp_path / "b"), loadkit.load_model(tmp_path / "a"))


def test_a_tied_head_is_written_once(tmp_path: Path) -> None:
    state = write_llama(tmp_path / "a", head=False)
    report = loadkit.convert(tmp_path / "a", tmp_path / "b")
    same(read(tmp_path / "b"), state)
    assert report.ties == {"model.embed_tokens.weight": ["lm_head.weight"]}


def test_a_tied_head_that_differs_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    state = llama_sd()
    write_cfg(tmp_path / "a", tie_word_embeddings=True)
    write_st(tmp_path / "a/model.safetensors", state)
    with pytest.raises(ModelError, match="embed_tokens") as caught:
        loadkit.convert(tmp_path / "a", tmp_path / "b")
    assert caught.value.code == "TIED_DIFFER"
    assert names_in(tmp_path) == ["a"]


def test_floats_are_cast_as_a_load_casts_them(tmp_path: Path) -> None:
    state = write_llama(tmp_path / "a")
    report = loadkit.convert(tmp_path / "a", tmp_path / "b", dtype="bfloat16")
    same(read(tmp_path / "b"), {name: t.to(torch.bfloat16) for name, t in state.items()})
    assert report.casts == [{"from": "float32", "to": "bfloat16", "tensors": 21}]
    assert json.loads((tmp_path / "b/config.json").read_text())["torch_dtype"] == "bfloat16"


def test_a_number_that_a_dtype_cannot_hold_is_an_error_unless_it_was_asked_for(
    tmp_path: Path,
) -> None:
    state = write_llama(tmp_path / "a", torch_dtype="float16")
    state["model.norm.weight"][3] = 1e30
    write_st(tmp_path / "a/model.safetensors", state)
    with pytest.raises(ModelError, match=r"model\.norm\.weight became infinite"):
        loadkit.convert(tmp_path / "a", tmp_path / "b")
    assert names_in(tmp_path) == ["a"]
    report = loadkit.convert(tmp_path / "a", tmp_path / "b", dtype="float16")
    assert any("model.norm.weight" in text for text in report.warnings)


def test_a_gguf_becomes_hugging_faces_names_and_numbers(tmp_path: Path) -> None:
    path = lone_llama(tmp_path / "model.gguf")
    report = loadkit.convert(path, tmp_path / "b", dtype="float32")
    assert report.warnings == ["the tokenizer inside of the gguf file is not written"]
    model = loadkit.load_model(path, dtype="float32")
    loadkit.save(model, tmp_path / "c")
    same(read(tmp_path / "b"), read(tmp_path / "c"))
    same_models(loadkit.load_model(tmp_path / "b"), model)
    found = loadkit.diff(path, tmp_path / "b", dtype="float32")
    assert (found.equal, found.names) == (True, "model")


# -- without a model -----------------------------------------------------------------------------


def odd_tensors() -> Tensors:
    """Dtypes and shapes that a format may hold."""
    made = torch.Generator().manual_seed(1)
    return {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "counts": torch.arange(7, dtype=torch.int64),
        "mask": torch.tensor([True, False, True]),
        "half": torch.randn(3, 5, generator=made).half(),
        "codes": torch.randint(0, 255, (5, 2), generator=made, dtype=torch.uint8),
        "f8": torch.randn(4, 4, generator=made).to(torch.float8_e4m3fn),
        "deep": torch.randn(2, 3, 1, 2, generator=made),
    }


def test_without_a_model_every_tensor_is_copied_by_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    write_shards(tmp_path / "a", odd_tensors(), 2)
    report = loadkit.convert(tmp_path / "a", tmp_path / "b")
    same(read(tmp_path / "b"), odd_tensors())
    assert report.names == "checkpoint"
    assert "has no config.json" in report.names_why
    assert loadkit.diff(tmp_path / "a", tmp_path / "b").equal


def test_an_unknown_architecture_is_no_obstacle_unless_a_model_is_asked_for(
    tmp_path: Path,
) -> None:
    write_cfg(tmp_path / "a", architectures=["NobodyForCausalLM"])
    write_st(tmp_path / "a/model.safetensors", odd_tensors())
    (tmp_path / "a/tokenizer.json").write_text("{}")
    assert loadkit.convert(tmp_path / "a", tmp_path / "b").copied == ("tokenizer.json",)
    assert names_in(tmp_path / "b") == [
        "config.json",
        "loadkit_manifest.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    config = json.loads((tmp_path / "b/config.json").read_text())
    assert config == json.loads((tmp_path / "a/config.json").read_text())
    with pytest.raises(ArchitectureError):
        loadkit.convert(tmp_path / "a", tmp_path / "c", names="model")
    with pytest.raises(ArchitectureError):
        loadkit.convert(tmp_path / "a", tmp_path / "c", hf_overrides={"hidden_size": 8})


def test_without_a_model_floats_are_cast_and_codes_are_not(tmp_path: Path) -> None:
    write_st(tmp_path / "a.safetensors", odd_tensors())
    loadkit.convert(tmp_path / "a.safetensors", tmp_path / "b", dtype="float32")
    floats = {"scalar", "empty", "half", "deep"}
    same(
        read(tmp_path / "b"),
        {n: t.to(torch.float32) if n in floats else t for n, t in odd_tensors().items()},
    )


def test_the_scales_of_a_quantised_checkpoint_are_not_cast(tmp_path: Path) -> None:
    write_cfg(tmp_path / "a", quantization_config={"quant_method": "fp8"})
    write_st(tmp_path / "a/model.safetensors", odd_tensors())
    with pytest.raises(UsageError, match="scales") as caught:
        loadkit.convert(tmp_path / "a", tmp_path / "b", names="checkpoint", dtype="bfloat16")
    assert caught.value.code == "QUANTIZED"
    loadkit.convert(tmp_path / "a", tmp_path / "b", names="checkpoint")
    same(read(tmp_path / "b"), odd_tensors())


def test_a_gguf_keeps_its_names_where_that_is_asked_for(tmp_path: Path) -> None:
    path = lone_llama(tmp_path / "model.gguf")
    loadkit.convert(path, tmp_path / "b", names="checkpoint")
    same(read(tmp_path / "b"), dict(loadkit.iter_weights(path)))
    assert "blk.0.attn_q.weight" in read(tmp_path / "b")


def test_S49_names_never_become_paths(tmp_path: Path) -> None:
    names = ["../../abs/x", "/etc/passwd", "..", "a/b\\c", "C:x", "con", "model.safetensors", "💾"]
    state = {name: torch.full((2,), float(i)) for i, name in enumerate(names)}
    (tmp_path / "in").mkdir()
    write_st(tmp_path / "in/model.safetensors", state)
    before = contents(tmp_path)
    loadkit.convert(tmp_path / "in", tmp_path / "in/out/deep", max_shard_bytes=8)
    same(read(tmp_path / "in/out/deep"), state)
    files = {f"model-{n:05d}-of-00008.safetensors" for n in range(1, 9)}
    made = set(contents(tmp_path)) - set(before)
    extra = {"model.safetensors.index.json", "loadkit_manifest.json"}
    assert {Path(name).parent.as_posix() for name in made} == {"in/out/deep"}
    assert {Path(name).name for name in made} == files | extra
    assert loadkit.diff(tmp_path / "in", tmp_path / "in/out/deep").equal


# -- what is computed ----------------------------------------------------------------------------


class Turned(nn.Module):
    """Holds its weight transposed and shifted, and says how to undo that."""

    hf_to_loadkit_mapper = loadkit.WeightsMapper()

    def __init__(self, *, config: Any, prefix: str = "") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 4))
        self.extra = nn.Parameter(torch.empty(3))

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            if name == "weight":
                self.weight.data.copy_(tensor.t() + 1)
            else:
                self.extra.data.copy_(tensor)

    def checkpoint_part(self, name: str, shard_id: Any) -> torch.Tensor | None:
        return (self.weight.detach() - 1).t() if name == "weight" else None


def test_a_layer_that_computes_its_weights_is_undone_without_them_in_memory(
    tmp_path: Path,
) -> None:
    ModelRegistry.register_model("TurnedModel", Turned)
    config = {"architectures": ["TurnedModel"], "model_type": "turned", "torch_dtype": "float32"}
    (tmp_path / "a").mkdir()
    (tmp_path / "a/config.json").write_text(json.dumps(config))
    state = {"weight": torch.arange(24.0).reshape(4, 6), "extra": torch.ones(3)}
    write_st(tmp_path / "a/model.safetensors", state)
    loadkit.convert(tmp_path / "a", tmp_path / "b")
    same(read(tmp_path / "b"), state)


@pytest.mark.parametrize("kind", ["plain", "gguf", "cast"])
def test_large_tensors_are_written_slab_by_slab(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loadkit.conversion.outputs.BUDGET", 700)
    monkeypatch.setattr("loadkit.conversion.writing.BUDGET", 700)
    cut = outputs.slabs_of
    seen: list[int] = []

    def slabs_of(output: outputs.Output, budget: int = 700) -> Any:
        for slab in cut(output, 700):
            seen.append(slab.nbytes)
            yield slab

    monkeypatch.setattr("loadkit.conversion.writing.slabs_of", slabs_of)
    if kind == "gguf":
        source = lone_llama(tmp_path / "model.gguf")
        expected = dict(loadkit.iter_weights(source))
        loadkit.convert(source, tmp_path / "b", names="checkpoint")
    else:
        source, expected = tmp_path / "a", write_llama(tmp_path / "a", vocab=100)
        dtype = torch.bfloat16 if kind == "cast" else torch.float32
        expected = {name: tensor.to(dtype) for name, tensor in expected.items()}
        loadkit.convert(source, tmp_path / "b", dtype=dtype)
    same(read(tmp_path / "b"), expected)
    assert len(seen) > len(expected) + 10
    assert max(seen) <= 1024


# -- what is refused -----------------------------------------------------------------------------


def test_problems_of_the_plan_come_before_a_byte_is_written(tmp_path: Path) -> None:
    state = write_llama(tmp_path / "a")
    del state["model.norm.weight"]
    state["model.layers.0.mlp.up_proj.weight"] = torch.ones(3)
    write_st(tmp_path / "a/model.safetensors", state)
    with pytest.raises(PlanError) as caught:
        loadkit.convert(tmp_path / "a", tmp_path / "b")
    assert {problem.code for problem in caught.value.problems} == {"MISSING", "SHAPE_MISMATCH"}
    assert names_in(tmp_path) == ["a"]


def test_a_disk_with_too_little_space_is_refused_before_a_byte_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_llama(tmp_path / "a")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    with pytest.raises(WriteError, match=r"needs \d+ bytes more, and 1048576 are free") as caught:
        loadkit.convert(tmp_path / "a", tmp_path / "b")
    assert caught.value.errno == 28
    assert caught.value.exit_code == 3
    assert names_in(tmp_path) == ["a"]


def test_what_is_there_is_replaced_only_if_that_is_said(tmp_path: Path) -> None:
    state = write_llama(tmp_path / "a")
    loadkit.convert(tmp_path / "a", tmp_path / "b", max_shard_bytes=6_000)
    (tmp_path / "b/notes.txt").write_text("mine")
    before = contents(tmp_path / "b")
    with pytest.raises(UsageError) as caught:
        loadkit.convert(tmp_path / "a", tmp_path / "b")
    assert caught.value.code == "EXISTS"
    assert contents(tmp_path / "b") == before
    loadkit.convert(tmp_path / "a", tmp_path / "b", overwrite=True)
    same(read(tmp_path / "b"), state)
    assert "notes.txt" in names_in(tmp_path / "b")
    assert "model.safetensors.index.json" not in names_in(tmp_path / "b")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is a file"):
        loadkit.convert(tmp_path / "a", tmp_path / "file", overwrite=True)


def test_a_checkpoint_may_be_converted_in_its_own_place(tmp_path: Path) -> None:
    state = write_llama(tmp_path / "a", shards=3)
    loadkit.convert(tmp_path / "a", tmp_path / "a", overwrite=True, dtype="bfloat16")
    same(read(tmp_path / "a"), {name: t.to(torch.bfloat16) for name, t in state.items()})
    assert names_in(tmp_path / "a") == ["config.json", "loadkit_manifest.json", "model.safetensors"]


def test_a_source_that_changes_meanwhile_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_llama(tmp_path / "a")
    real = outputs.read_slabs

    def read_slabs(*args: Any) -> Any:
        found = real(*args)
        (tmp_path / "a/model.safetensors").touch()
        return found

    monkeypatch.setattr("loadkit.conversion.writing.read_slabs", read_slabs)
    with pytest.raises(ChangedError):
        loadkit.convert(tmp_path / "a", tmp_path / "b")
    assert names_in(tmp_path) == ["a"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"to": "gguf"}, "to is 'gguf'"),
        ({"names": "mine"}, "names is 'mine'"),
        ({"tp": 2}, "tp 2 was asked for"),
        ({"max_shard_bytes": 0}, "max_shard_bytes is 0"),
        ({"names": "checkpoint", "quantization": "fp8"}, "quantization say"),
        ({"names": "checkpoint", "dtype": "floaty"}, "floaty"),
        ({"metadata": {"format": "tf"}}, "format"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_options_that_cannot_be_are_refused(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    write_llama(tmp_path / "a")
    with pytest.raises(OptionError, match=said):
        loadkit.convert(tmp_path / "a", tmp_path / "b", **options)
    assert names_in(tmp_path) == ["a"]


def test_what_is_read_is_verified_where_that_is_asked_for(tmp_path: Path) -> None:
    write_llama(tmp_path / "a")
    loadkit.convert(tmp_path / "a", tmp_path / "b")
    path = tmp_path / "b/model.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    checked = loadkit.LoadConfig(verify="digest")
    loadkit.convert(tmp_path / "b", tmp_path / "c")  # nobody asked
    for source in ("convert", "diff"):
        with pytest.raises(IntegrityError, match=r"model\.safetensors"):
            getattr(loadkit, source)(tmp_path / "b", tmp_path / "d", load_config=checked)
        shutil.copytree(tmp_path / "c", tmp_path / "d", dirs_exist_ok=True)
    assert names_in(tmp_path) == ["a", "b", "c", "d"]
    shutil.rmtree(tmp_path / "d")
    loadkit.convert(tmp_path / "c", tmp_path / "d", load_config=checked, to="sharded_state", tp=2)
    assert loadkit.diff(tmp_path / "c", tmp_path / "d", load_config=checked).equal


@pytest.mark.parametrize(
    "config",
    [{"device": "meta"}, {"rank_timeout": 7.0}, {"staging_slots": 3}],
    ids=lambda config: next(iter(config)),
)
def test_options_of_models_in_memory_are_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    write_llama(tmp_path / "a")
    load_config = loadkit.LoadConfig(**config)
    for names in ("model", "checkpoint"):
        with pytest.raises(OptionError, match=next(iter(config))):
            loadkit.convert(tmp_path / "a", tmp_path / "b", names=names, load_config=load_config)
