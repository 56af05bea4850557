"""Layouts of rank files: small parameters, post-processed weights, packed GGUF blocks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import loadkit
from helpers.gguf_blocks import quantised
from helpers.gguf_files import LLAMA_KEYS, llama_tensors, write_gguf
from helpers.saving import same
from helpers.sharded import QUIET, edit_manifest, ranks_of, same_state, save_ranks
from loadkit import ModelRegistry
from loadkit.config import ParallelConfig
from loadkit.errors import ConfigFileError, ModelError, PlanError, ShardedError
from loadkit.manifest import MANIFEST, parse_manifest


def load(folder: Path, parallel: ParallelConfig | None = None, **options: Any) -> Any:
    options = {"load_config": QUIET, **options}
    return loadkit.load(folder, parallel=parallel or ParallelConfig(), **options)


def save(model: nn.Module, folder: Path) -> Any:
    return loadkit.save(model, folder, save_format="sharded_state")


# -- SS-02, SS-04 -------------------------------------------------------------------------------


class Scales(nn.Module):
    """Four 0-dim parameters in one memory, a view of another parameter, buffers of both kinds."""

    def __init__(self, *, config: Any = None, prefix: str = "") -> None:
        super().__init__()
        memory = torch.ones(4)
        for at, name in enumerate(("q_scale", "k_scale", "v_scale", "prob_scale")):
            self.register_parameter(name, nn.Parameter(memory[at], requires_grad=False))
        self.w = nn.Parameter(torch.zeros(4, 4))
        self.turned = nn.Parameter(torch.zeros(3, 5).t())
        self.register_buffer("counts", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("cache", torch.full((2,), 7.0), persistent=False)

    def load_weights(self, weights: Any) -> set[str]:
        from loadkit import AutoWeightsLoader

        return AutoWeightsLoader(self).load_weights(weights)


def numbered(model: nn.Module) -> dict[str, torch.Tensor]:
    """Different numbers for everything a checkpoint of the module has."""
    found = {}
    for at, (name, tensor) in enumerate(model.state_dict().items()):
        made = torch.arange(tensor.numel()).reshape(tensor.shape) + 100 * at
        found[name] = made.to(tensor.dtype)
    return found


@pytest.fixture
def scales(tmp_path: Path) -> Any:
    """A model that loadkit built and loaded, and its numbers."""
    ModelRegistry.register_model("Scales", Scales)
    source = tmp_path / "source"
    source.mkdir()
    config = {"architectures": ["Scales"], "model_type": "scales", "torch_dtype": "float32"}
    (source / "config.json").write_text(json.dumps(config))
    numbers = numbered(Scales())
    save_file(numbers, source / "model.safetensors")
    return load(source).model, numbers


def test_SS_02_every_small_parameter_comes_back(scales: Any, tmp_path: Path) -> None:
    model, numbers = scales
    save(model, tmp_path / "out")
    found = load(tmp_path / "out").model
    same({name: t.detach().contiguous() for name, t in found.state_dict().items()}, numbers)
    assert found.q_scale.dim() == 0 and found.turned.shape == (5, 3)


def test_SS_02_scalars_that_share_memory_of_a_module_the_user_built(tmp_path: Path) -> None:
    module = Scales()
    assert (
        module.q_scale.untyped_storage().data_ptr() == module.k_scale.untyped_storage().data_ptr()
    )
    with torch.no_grad():
        for at, name in enumerate(("q_scale", "k_scale", "v_scale", "prob_scale")):
            getattr(module, name).fill_(at + 2)
    save(module, tmp_path / "out")
    other = Scales()
    loadkit.load_into(other, tmp_path / "out")
    assert [float(getattr(other, n)) for n in ("q_scale", "k_scale", "v_scale", "prob_scale")] == [
        2, 3, 4, 5,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.register_parameter("more", nn.Parameter(torch.zeros(2))),
        lambda model: delattr(model, "w"),
        lambda model: setattr(model, "w", nn.Parameter(torch.zeros(2, 4))),
        lambda model: delattr(model, "counts"),
    ],
    ids=["more", "fewer", "shape", "buffer"],
)
def test_SS_02_what_a_load_would_not_take_is_not_written(
    change: Callable[[Any], None], scales: Any, tmp_path: Path
) -> None:
    model, _ = scales
    change(model)
    with pytest.raises(ShardedError, match="could not be loaded back"):
        save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Halving(nn.Module):
    """SS-04: post-processing keeps every second column, turned."""

    layout_version: ClassVar[int | None] = 1

    def __init__(self, *, config: Any = None, prefix: str = "") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 8))
        self.scale = nn.Parameter(torch.zeros(4))
        self.runs = 0

    def load_weights(self, weights: Any) -> set[str]:
        from loadkit import AutoWeightsLoader

        return AutoWeightsLoader(self).load_weights(weights)

    def process_weights_after_loading(self, dtype: Any = None) -> None:
        self.runs += 1
        self.weight = nn.Parameter(self.weight.data[:, ::2].t().contiguous(), requires_grad=False)
        self.packed = nn.Parameter(self.scale.data.view(torch.int32).clone(), requires_grad=False)
        del self.scale


class Unsaid(Halving):
    layout_version = None


@pytest.fixture
def halving(tmp_path: Path) -> Any:
    source = tmp_path / "source"
    source.mkdir()
    for name, cls in (("Halving", Halving), ("Unsaid", Unsaid)):
        ModelRegistry.register_model(name, cls)
    config = {"architectures": ["Halving"], "model_type": "x", "torch_dtype": "float32"}
    (source / "config.json").write_text(json.dumps(config))
    save_file(numbered(Halving()), source / "model.safetensors")
    return source


def test_SS_04_a_processed_state_is_not_processed_twice(halving: Path, tmp_path: Path) -> None:
    model = load(halving).model
    save(model, tmp_path / "out")
    manifest = parse_manifest((tmp_path / "out" / MANIFEST).read_bytes())
    assert manifest.layout == "runtime-processed"
    (version,) = manifest.layout_versions.items()
    assert version == (f"{Halving.__module__}:Halving", "1")
    found = load(tmp_path / "out")
    same_state(found.model, model)
    assert (model.runs, found.model.runs) == (1, 0)
    assert found.model.weight.shape == (4, 4) and not hasattr(found.model, "scale")
    assert found.report.aliased_bytes == found.report.bytes_read
    save(found.model, tmp_path / "again")
    same_state(load(tmp_path / "again").model, model)


def test_SS_04_a_processed_state_is_not_cut_anew(halving: Path, tmp_path: Path) -> None:
    save(load(halving).model, tmp_path / "out")
    for parallel in (ParallelConfig(tp_size=2), ParallelConfig(tp_size=4, tp_rank=3)):
        said = r"of tp 1.*Halving.*cannot be cut anew"
        with pytest.raises(ShardedError, match=said) as caught:
            load(tmp_path / "out", parallel)
        assert caught.value.detail["saved"] == "tp 1"


def test_SS_04_a_class_that_does_not_say_its_layout_is_not_saved(
    halving: Path, tmp_path: Path
) -> None:
    model = load(halving, architecture="Unsaid").model
    with pytest.raises(ModelError, match=r"Unsaid.*no layout_version") as caught:
        save(model, tmp_path / "out")
    assert caught.value.code == "LAYOUT_UNKNOWN"
    assert not (tmp_path / "out").exists()


def test_SS_04_nobody_knows_whether_a_module_of_the_users_was_processed(tmp_path: Path) -> None:
    for run in (False, True):
        module = Halving()
        if run:
            module.process_weights_after_loading()
        with pytest.raises(ModelError, match="may have run or not"):
            save(module, tmp_path / "out")


def test_SS_04_another_version_of_a_layout_is_refused(
    halving: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(load(halving).model, tmp_path / "out")
    monkeypatch.setattr(Halving, "layout_version", 2)
    with pytest.raises(PlanError, match="saved 1, here 2"):
        load(tmp_path / "out")


def test_SS_04_a_processed_state_in_another_dtype_is_refused(halving: Path, tmp_path: Path) -> None:
    save(load(halving).model, tmp_path / "out")
    found = load(tmp_path / "out", dtype="bfloat16").model
    assert found.weight.dtype == torch.float32  # parameters are what was saved, not cast


# -- packed GGUF --------------------------------------------------------------------------------


def packed_source(folder: Path) -> Path:
    keys = [(k, {"llama.embedding_length": 128, "llama.attention.head_count": 8}.get(k, v))
            for k, v in LLAMA_KEYS]  # fmt: skip
    keys = [(k, {"llama.attention.head_count_kv": 4, "llama.feed_forward_length": 256}.get(k, v))
            for k, v in keys]  # fmt: skip
    tensors = llama_tensors(hidden=128, heads=8, kv=4, ffn=256, vocab=41, head=True)
    kinds = {"attn_k": "Q4_1", "ffn_up": "Q5_0"}

    def kind_of(name: str) -> str | None:
        if "norm" in name:
            return None
        return next((kind for part, kind in kinds.items() if part in name), "Q8_0")

    folder.mkdir()
    return write_gguf(folder / "m.gguf", quantised(tensors, kind_of), keys)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_packed_gguf_blocks_come_back_bit_for_bit(tp: int, tmp_path: Path) -> None:
    source = packed_source(tmp_path / "source")
    ranks = ranks_of(tp_size=tp)
    models = save_ranks(source, tmp_path / "out", ranks, quantization="gguf", dtype="float32")
    assert any(param.dtype == torch.uint8 for param in models[0].parameters())
    for parallel, model in zip(ranks, models, strict=True):
        found = load(tmp_path / "out", parallel)
        same_state(found.model, model)
        if tp == 1:
            ids = torch.arange(5)
            with torch.inference_mode():
                assert torch.equal(found.model(ids, ids), model(ids, ids))


@pytest.mark.parametrize(("saved", "asked"), [(1, 2), (4, 1), (2, 4)])
def test_packed_gguf_blocks_are_cut_anew(saved: int, asked: int, tmp_path: Path) -> None:
    source = packed_source(tmp_path / "source")
    options = {"quantization": "gguf", "dtype": "float32"}
    save_ranks(source, tmp_path / "out", ranks_of(tp_size=saved), **options)
    for parallel in ranks_of(tp_size=asked):
        expected = load(source, parallel, **options).model
        same_state(load(tmp_path / "out", parallel).model, expected)


def test_decoded_gguf_is_saved_in_hugging_faces_order(tmp_path: Path) -> None:
    source = packed_source(tmp_path / "source")
    save_ranks(source, tmp_path / "out", ranks_of(tp_size=2), dtype="bfloat16")
    for parallel in ranks_of(tp_size=4):
        expected = load(source, parallel, dtype="bfloat16").model
        same_state(load(tmp_path / "out", parallel).model, expected)


def test_another_quantization_than_the_saved_one_is_refused(tmp_path: Path) -> None:
    source = packed_source(tmp_path / "source")
    save_ranks(source, tmp_path / "out", ranks_of(tp_size=1), quantization="gguf", dtype="float32")
    with pytest.raises(ConfigFileError, match="gguf"):
        load(tmp_path / "out", quantization="bitsandbytes")


@pytest.mark.parametrize(
    "values", [{}, {"misaligned": "error"}, {"misaligned": "error", "tensors": [["a"]]}]
)
def test_a_saved_quantization_that_lies_is_a_typed_error(values: Any, tmp_path: Path) -> None:
    source = packed_source(tmp_path / "source")
    save_ranks(source, tmp_path / "out", ranks_of(tp_size=1), quantization="gguf", dtype="float32")
    edit_manifest(tmp_path / "out", lambda content: content["quantization"].update(config=values))
    with pytest.raises(ConfigFileError):
        load(tmp_path / "out")


def test_a_saved_method_that_nobody_has_is_a_typed_error(tmp_path: Path) -> None:
    source = packed_source(tmp_path / "source")
    save_ranks(source, tmp_path / "out", ranks_of(tp_size=1), quantization="gguf", dtype="float32")
    edit_manifest(tmp_path / "out", lambda content: content["quantization"].update(method="os.x"))
    with pytest.raises(ConfigFileError, match=r"os\.x"):
        load(tmp_path / "out")
