"""Modules with mappers of every kind, or none, are saved so that they load again; or refused."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import loadkit
from helpers.checkpoints import write_llama, write_st
from helpers.families import build
from helpers.saving import read, same, same_models
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.errors import CoverageError, ModelError, OptionError, UnknownNameError, UsageError
from loadkit.mapper import WeightsMapper
from loadkit.origin import origin_of, remember


class Third(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
        self.head = nn.Linear(4, 6)
        self.head.weight = self.body[0].weight
        self.register_buffer("table", torch.ones(3), persistent=False)


def test_a_module_without_a_mapper_is_saved_under_its_own_names(tmp_path: Path) -> None:
    model = Third()
    report = loadkit.save(model, tmp_path)
    expected = {n: t for n, t in model.state_dict().items() if n != "head.weight"}
    same(read(tmp_path), expected)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    assert report.ties == {"body.0.weight": ["head.weight"]}
    other = Third()
    loadkit.load_into(other, tmp_path)
    same(dict(other.state_dict()), dict(model.state_dict()))


def test_buffers_are_saved_if_the_checkpoint_had_them(tmp_path: Path) -> None:
    state = {n: t for n, t in Third().state_dict().items() if n != "head.weight"}
    del state["body.1.running_var"], state["body.1.num_batches_tracked"]
    (tmp_path / "a").mkdir()
    write_st(tmp_path / "a/model.safetensors", state)
    model = Third()
    loadkit.load_into(model, tmp_path / "a")
    loadkit.save(model, tmp_path / "b")
    same(read(tmp_path / "b"), state)


def test_the_mapper_of_load_into_leads_back(tmp_path: Path) -> None:
    mapper = WeightsMapper(
        orig_to_new_regex={r"^h\.(\d+)\.": r"body.\1."}, orig_to_new_prefix={"top.": "head."}
    )
    given = {"h.0.weight": torch.randn(6, 4), "h.0.bias": torch.randn(6), "top.bias": torch.ones(6)}
    given |= {"h.1.weight": torch.ones(6), "h.1.bias": torch.ones(6)}
    (tmp_path / "a").mkdir()
    write_st(tmp_path / "a/model.safetensors", given)
    model = Third()
    loadkit.load_into(model, tmp_path / "a", mapper=mapper)
    loadkit.save(model, tmp_path / "b")
    same(read(tmp_path / "b"), given)  # a regex has no way back; the checkpoint's names are known
    with pytest.raises(ModelError) as caught:
        loadkit.save(Third(), tmp_path / "c", mapper=WeightsMapper(orig_to_new_prefix={"": "x."}))
    assert caught.value.code == "NAME_NOT_REVERSIBLE"
    assert not (tmp_path / "c").exists()


class Inner(nn.Module):
    hf_to_loadkit_mapper: ClassVar[WeightsMapper] = WeightsMapper(
        orig_to_new_stacked={"left": ("both", 0), "right": ("both", 1)}
    )

    def __init__(self) -> None:
        super().__init__()
        from loadkit_layers.merged_linear import MergedColumnParallelLinear

        self.both = MergedColumnParallelLinear(4, [3, 5], parallel=ParallelConfig())
        nn.init.normal_(self.both.weight)
        nn.init.normal_(self.both.bias)

    def load_weights(self, weights: Any) -> set[str]:
        return loadkit.AutoWeightsLoader(self).load_weights(
            weights, mapper=self.hf_to_loadkit_mapper
        )


class Outer(nn.Module):
    hf_to_loadkit_mapper: ClassVar[WeightsMapper] = WeightsMapper(
        orig_to_new_prefix={"vision.": "tower."}
    )

    def __init__(self) -> None:
        super().__init__()
        self.tower = Inner()
        self.plain = nn.Linear(2, 2)


def test_mappers_inside_run_backwards_first(tmp_path: Path) -> None:
    model, other = Outer(), Outer()
    loadkit.save(model, tmp_path)
    found = read(tmp_path)
    assert set(found) == {
        *(f"vision.{side}.{kind}" for side in ("left", "right") for kind in ("weight", "bias")),
        "plain.weight",
        "plain.bias",
    }
    assert torch.equal(found["vision.right.weight"], model.tower.both.weight[3:])
    loadkit.load_into(other, tmp_path, mapper=Outer.hf_to_loadkit_mapper)
    same_models(other, model)


class Packed(nn.Module):
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {"both": ["left", "right"]}

    def __init__(self) -> None:
        super().__init__()
        self.both = Inner().both


def test_a_packed_modules_mapping_splits_without_a_mapper(tmp_path: Path) -> None:
    model, other = Packed(), Packed()
    loadkit.save(model, tmp_path)
    found = read(tmp_path)
    assert set(found) == {"left.weight", "left.bias", "right.weight", "right.bias"}
    assert torch.equal(found["left.bias"], model.both.bias[:3])
    loadkit.load_into(other, tmp_path)
    same_models(other, model)


class ByHand(nn.Module):
    """Loading code of its own: a transposed weight, a fused one, a computed one."""

    computes = False

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.empty(4, 6))
        self.pair = nn.Parameter(torch.empty(5, 3))

    def load_weights(self, weights: Any) -> set[str]:
        for name, tensor in weights:
            if name == "w":
                self.turned.data.copy_(tensor.t())
            elif name == "first":
                self.pair.data[:2].copy_(-tensor if self.computes else tensor)
            else:
                self.pair.data[2:].copy_(tensor.view(3, 3))
        return set()


def test_loading_code_of_ones_own_is_undone_by_the_plan(tmp_path: Path) -> None:
    state = {"w": torch.randn(6, 4), "first": torch.randn(2, 3), "flat": torch.randn(9)}
    (tmp_path / "a").mkdir()
    write_st(tmp_path / "a/model.safetensors", state)
    model = ByHand()
    loadkit.load_into(model, tmp_path / "a")
    model.turned.data.mul_(2)
    loadkit.save(model, tmp_path / "b")
    same(read(tmp_path / "b"), {**state, "w": state["w"] * 2})


def test_what_was_computed_is_refused_and_not_saved_as_if_it_were_read(tmp_path: Path) -> None:
    class Computing(ByHand):
        computes = True

    state = {"w": torch.randn(6, 4), "first": torch.randn(2, 3), "flat": torch.randn(9)}
    write_st(tmp_path / "model.safetensors", state)
    model = Computing()
    loadkit.load_into(model, tmp_path)
    with pytest.raises(ModelError) as caught:
        loadkit.save(model, tmp_path / "b")
    assert caught.value.code == "NOT_INVERTIBLE"
    assert list(caught.value.detail["parameters"]) == ["pair"]


def test_a_layer_may_undo_its_own_loading(tmp_path: Path) -> None:
    class Negative(nn.Linear):
        calls = 0

        def checkpoint_part(self, name: str, shard_id: Any) -> torch.Tensor | None:
            self.calls += 1
            return -self.weight.detach() if name == "weight" else None

    layer = Negative(3, 2)
    loadkit.save(nn.Sequential(layer), tmp_path)
    same(read(tmp_path), {"0.weight": -layer.weight.detach(), "0.bias": layer.bias.detach()})
    assert layer.calls == 3  # the weight once for its shape, and once when it is written


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("built", [False, True], ids=["loaded", "built"])
def test_one_rank_of_two_cannot_be_saved(tmp_path: Path, built: bool) -> None:
    write_llama(tmp_path / "a")
    parallel = ParallelConfig(tp_size=2, tp_rank=1)
    if built:
        config = json.loads((tmp_path / "a/config.json").read_text())
        model = build("loadkit_models.llama:LlamaForCausalLM", config, parallel)
    else:
        model = loadkit.load_model(tmp_path / "a", parallel=parallel)
    with pytest.raises(UsageError, match="tp 1") as caught:
        loadkit.save(model, tmp_path / "b")
    assert caught.value.code == "PARTIAL_MODEL"
    assert not (tmp_path / "b").exists()


def test_weights_that_are_quantised_in_memory_only_cannot_be_saved(tmp_path: Path) -> None:
    class Blocks:
        @classmethod
        def get_name(cls) -> str:
            return "blocks"

        def to_config(self) -> None:
            """No config.json can say it."""

    write_llama(tmp_path / "a")
    model = loadkit.load_model(tmp_path / "a")
    origin = origin_of(model)
    assert origin is not None
    held: Any = Blocks()
    remember(model, replace(origin, config=replace(origin.config, quant_config=held)))
    with pytest.raises(UsageError, match="blocks") as caught:
        loadkit.save(model, tmp_path / "b")
    assert caught.value.code == "QUANTIZED"
    layer = model.model.layers[0].mlp.down_proj

    class Repacking(type(layer.quant_method)):  # type: ignore[misc]
        def process_weights_after_loading(self, layer: nn.Module) -> None:
            """What it does cannot be undone."""

    remember(model, origin)
    layer.quant_method = Repacking()
    with pytest.raises(ModelError, match="Repacking") as repacked:
        loadkit.save(model, tmp_path / "b")
    assert repacked.value.code == "REPACKED"
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("name", "good"),
    [
        pytest.param("../../../../abs/x", True, id="S49-up"),
        pytest.param("/abs", True, id="S49-absolute"),
        pytest.param("C:\\x", True, id="S49-drive"),
        pytest.param("CON", True, id="S49-device"),
        pytest.param("a" * 5000, False, id="S49-long"),
        pytest.param("a" * 1024, True, id="S50-at-the-limit"),
        pytest.param("a\x1b[2J", False, id="S44"),
        pytest.param("__metadata__", False, id="metadata"),
    ],
)
def test_S49_a_name_is_never_a_path(tmp_path: Path, name: str, good: bool) -> None:
    class Named(nn.Module):
        hf_to_loadkit_mapper: ClassVar[WeightsMapper] = WeightsMapper(
            orig_to_new_rename={name: "w"}
        )

        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.arange(3.0))

    if good:
        loadkit.save(Named(), tmp_path / "out", max_shard_bytes=1)
        assert list(read(tmp_path / "out")) == [name]
    else:
        with pytest.raises(ModelError) as caught:
            loadkit.save(Named(), tmp_path / "out")
        assert caught.value.code == "E_NAME"
        assert len(str(caught.value)) < 500
    found = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert found == ([tmp_path / "out/model.safetensors"] if good else [])


def test_options_are_checked(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for bad in (0, -1, True, "5GB"):
        with pytest.raises(OptionError, match="max_shard_bytes"):
            loadkit.save(model, tmp_path / "x", max_shard_bytes=bad)  # type: ignore[arg-type]
    for metadata in ({"a": 1}, {"format": "np"}):
        with pytest.raises(OptionError, match="metadata"):
            loadkit.save(model, tmp_path / "x", metadata=metadata)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="config"):
        loadkit.save(model, tmp_path / "x", config=7)
    with pytest.raises(UnknownNameError, match="save_format"):
        loadkit.save(model, tmp_path / "x", save_format="pickle")
    with pytest.raises(UsageError, match="loaded and not saved"):
        loadkit.save(model, tmp_path / "x", save_format="dummy")
    with pytest.raises(CoverageError):
        loadkit.save(nn.Linear(2, 2, device="meta"), tmp_path / "x")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        loadkit.save(model, tmp_path / "file")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    model = Packed()
    model.left = nn.Linear(4, 3)
    with pytest.raises(ModelError, match=r"left\.weight") as caught:
        loadkit.save(model, tmp_path / "x")
    assert caught.value.code == "NAME_COLLISION"
    assert not (tmp_path / "x").exists()


# -- what a model remembers ----------------------------------------------------------------------


def test_a_copy_and_a_pickle_of_a_model_can_be_saved_too(tmp_path: Path) -> None:
    state = write_llama(tmp_path / "a")
    model = loadkit.load_model(tmp_path / "a", load_config=LoadConfig(alias="never"))
    twin = copy.deepcopy(model)
    assert origin_of(twin) is origin_of(model)
    loadkit.save(twin, tmp_path / "b")
    again = pickle.loads(pickle.dumps(model))
    loadkit.save(again, tmp_path / "c")
    for name in "bc":
        same(read(tmp_path / name), state)
        assert (tmp_path / name / "config.json").exists()


def test_a_shard_read_elsewhere_than_the_layer_says_is_an_error(tmp_path: Path) -> None:
    write_llama(tmp_path / "a")
    model = loadkit.load_model(tmp_path / "a")
    layer = model.model.layers[0].mlp.gate_up_proj
    up, gate = layer.output_shards
    layer.output_shards = (replace(gate, offset=0), replace(up, offset=32))
    with pytest.raises(ModelError, match="another part") as caught:
        loadkit.save(model, tmp_path / "b")
    assert caught.value.parameter == "model.layers.0.mlp.gate_up_proj.weight"
