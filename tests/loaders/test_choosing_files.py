"""``auto``, and which files a load takes: one test for each rule that is stated, on whole loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import loadkit
from helpers.checkpoints import llama_sd, write_cfg, write_index, write_shards, write_st
from helpers.mistral_files import write_mistral
from loadkit.config import LoadConfig
from loadkit.errors import (
    CheckpointError,
    ConfigFileError,
    IndexFileError,
    NoWeightsError,
    OptionError,
)
from loadkit.sources.local import LocalSource

SD = llama_sd()
ZEROS = {name: torch.zeros_like(tensor) for name, tensor in SD.items()}
Make = Callable[[Path], Any]


def st(name: str, state: dict[str, torch.Tensor] = SD) -> Make:
    return lambda folder: write_st(folder / name, state)


def pt(name: str, state: dict[str, torch.Tensor] = SD) -> Make:
    return lambda folder: torch.save(state, folder / name)


def junk(name: str) -> Make:
    """A file that must not be opened."""

    def make(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"junk")
        (folder / name).chmod(0)

    return make


def made(folder: Path, *makers: Make, **config: Any) -> Path:
    write_cfg(folder, **config)
    for make in makers:
        make(folder)
    return folder


def loaded(source: Path, **config: Any) -> Any:
    """The load of a checkpoint, which has to give ``SD``."""
    load_format = config.pop("load_format", "auto")
    result = loadkit.load(
        source,
        load_format=load_format,
        load_config=LoadConfig(use_tqdm_on_load=False, **config),
    )
    found = result.model.get_parameter("model.norm.weight")
    assert torch.equal(found, SD["model.norm.weight"])
    return result.plan


def skipped(plan: Any) -> dict[str, str]:
    return dict(plan.skipped_files)


# -- which format --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("makers", "load_format", "before"),
    [
        ((st("model.safetensors"), pt("pytorch_model.bin", ZEROS)), "safetensors", ".bin"),
        ((st("model.safetensors"), junk("m-Q4_0.gguf")), "safetensors", ".gguf"),
        ((st("model.safetensors"), junk("consolidated.safetensors")), "safetensors", "consoli"),
        ((pt("pytorch_model.bin"), junk("m-Q4_0.gguf")), "pt", ".gguf"),
        ((pt("pytorch_model.bin"), junk("m.tensors")), "pt", ".tensors"),
    ],
    ids=["DSC-05-bin", "gguf", "DSC-03-consolidated", "bin-gguf", "bin-tensors"],
)
def test_auto_takes_one_format_and_says_what_it_goes_before(
    makers: tuple[Make, ...], load_format: str, before: str, tmp_path: Path
) -> None:
    plan = loaded(made(tmp_path, *makers))
    assert plan.load_format == load_format
    assert "goes before" in plan.load_format_why and before in plan.load_format_why
    assert [name for name in skipped(plan) if before in name]


def test_consolidated_files_go_before_archives_and_are_read_as_mistrals(tmp_path: Path) -> None:
    config = made(tmp_path, pt("pytorch_model.bin", ZEROS))
    text = json.loads((config / "config.json").read_text())
    write_mistral(tmp_path, SD, text)
    plan = loaded(tmp_path)
    assert plan.load_format == "mistral" and "pytorch_model.bin" in skipped(plan)


def test_a_folder_with_both_of_mistrals_layouts_is_read_as_either(tmp_path: Path) -> None:
    made(tmp_path, lambda folder: write_shards(folder, SD, 2))
    write_mistral(tmp_path, SD, json.loads((tmp_path / "config.json").read_text()))
    assert loaded(tmp_path).load_format == "safetensors"
    plan = loaded(tmp_path, load_format="mistral")
    assert plan.files == ("consolidated.safetensors",)
    assert "model-00001-of-00002.safetensors" in skipped(plan)


def test_archives_are_not_fallen_back_to_where_that_is_off(tmp_path: Path) -> None:
    made(tmp_path, pt("pytorch_model.bin"))
    assert loaded(tmp_path).load_format == "pt"
    assert loaded(tmp_path, load_format="hf").files == ("pytorch_model.bin",)
    for load_format in ("auto", "hf"):
        with pytest.raises(NoWeightsError, match=r"load_format='pt' would read"):
            loaded(tmp_path, load_format=load_format, fall_back_to_pt=False)


def test_a_quantised_config_names_the_format_and_its_files_have_to_be_there(
    tmp_path: Path,
) -> None:
    quantised = {"quantization_config": {"quant_method": "gguf"}}
    made(tmp_path, st("model.safetensors"), **quantised)
    with pytest.raises(OptionError, match="GGUF file"):
        loadkit.plan(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError) as caught:  # the file is none, and it was opened
        loadkit.plan(tmp_path)
    assert caught.value.file == "m.gguf"


def test_BNB_02_auto_takes_bitsandbytes_for_a_config_that_names_it(tmp_path: Path) -> None:
    pytest.importorskip("loadkit_bitsandbytes")
    stated = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    made(tmp_path, st("model.safetensors"), junk("m.gguf"), **stated)
    with pytest.raises(ConfigFileError, match=r"'bitsandbytes'.*'safetensors'"):
        loadkit.plan(tmp_path, load_format="safetensors")
    plan = loadkit.plan(tmp_path)
    assert plan.load_format == "bitsandbytes"
    assert plan.load_format_why.startswith("config.json says quant_method 'bitsandbytes'")


def test_several_gguf_models_are_refused_with_the_list(tmp_path: Path) -> None:
    pytest.importorskip("loadkit_gguf")
    made(tmp_path, junk("m-Q4_0.gguf"), junk("m-Q8_0.gguf"))
    with pytest.raises(NoWeightsError) as caught:
        loadkit.plan(tmp_path)
    assert caught.value.code == "E_AMBIGUOUS"
    assert caught.value.detail["files"] == ["m-Q4_0.gguf", "m-Q8_0.gguf"]


# -- a file that is named ------------------------------------------------------------------------


@pytest.mark.parametrize("load_format", ["auto", "hf"])
@pytest.mark.parametrize(
    "make",
    [
        st("model.fp16.safetensors"),
        st("model.non_ema.safetensors"),
        pt("pytorch_model.fp16.bin"),
        st("anything.safetensors"),
        pt("weights.pth"),
    ],
    ids=["fp16", "non_ema", "fp16-bin", "other", "pth"],
)
def test_UX_02_a_variants_file_that_is_named_is_read(
    make: Make, load_format: str, tmp_path: Path
) -> None:
    made(tmp_path, make, st("model.safetensors", ZEROS), junk("adapter_model.safetensors"))
    named = [p for p in tmp_path.iterdir() if p.name not in ("config.json", "model.safetensors")]
    file = next(path for path in named if not path.name.startswith("adapter"))
    assert loaded(file, load_format=load_format).files == (file.name,)


def test_UX_02_only_variants_are_named_and_none_is_guessed(tmp_path: Path) -> None:
    made(tmp_path, st("model.fp16.safetensors"), st("model.bf16.safetensors"))
    with pytest.raises(NoWeightsError) as caught:
        loadkit.plan(tmp_path)
    names = ["model.bf16.safetensors", "model.fp16.safetensors"]
    assert caught.value.detail["variants"] == names


def test_DSC_06_an_adapters_file_is_no_model_even_where_it_is_named(tmp_path: Path) -> None:
    made(tmp_path, st("model.safetensors"), st("adapter_model.safetensors"))
    for load_format in ("auto", "safetensors", "hf"):
        with pytest.raises(NoWeightsError, match="adapter"):
            loadkit.plan(tmp_path / "adapter_model.safetensors", load_format=load_format)


# -- which files ---------------------------------------------------------------------------------


def test_DSC_02_a_stale_index_is_refused_with_what_is_there(tmp_path: Path) -> None:
    weight_map = write_shards(made(tmp_path), SD, 2)
    stale = {name: file.replace("of-00002", "of-00003") for name, file in weight_map.items()}
    write_index(tmp_path, stale)
    with pytest.raises(IndexFileError) as caught:
        loadkit.plan(tmp_path)
    assert caught.value.detail["on_disk"] == sorted(set(weight_map.values()))
    assert len(loaded(tmp_path, ignore_index=True).files) == 2


def test_two_complete_sets_are_refused_with_the_sets(tmp_path: Path) -> None:
    made(tmp_path, lambda folder: write_shards(folder, SD, 2, index=False))
    write_shards(tmp_path, ZEROS, 3, index=False)
    with pytest.raises(IndexFileError, match="more than one set") as caught:
        loadkit.plan(tmp_path)
    sets = caught.value.detail["sets"]
    assert isinstance(sets, list) and [len(each) for each in sets] == [2, 3]
    plan = loaded(tmp_path, allow_patterns_overrides=("model-*-of-00002.safetensors",))
    assert len(plan.files) == 2


@pytest.mark.parametrize("load_format", ["auto", "hf", "pt"])
@pytest.mark.parametrize("patterns", [None, ("*.bin", "*.pt", "*.pth")])
def test_DSC_07_training_files_are_never_opened_whatever_the_patterns(
    patterns: tuple[str, ...] | None,
    load_format: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[str] = []
    really = LocalSource.open

    def watched(source: LocalSource, name: str) -> Any:
        opened.append(name)
        return really(source, name)

    monkeypatch.setattr(LocalSource, "open", watched)
    training = ["optimizer.pt", "scheduler.pt", "training_args.bin", "rng_state_0.pth", "scaler.pt"]
    made(tmp_path, pt("pytorch_model.bin"), *map(junk, training))
    plan = loaded(tmp_path, load_format=load_format, allow_patterns_overrides=patterns)
    assert plan.files == ("pytorch_model.bin",)
    assert {skipped(plan)[name] for name in training} == {"training state"}
    assert set(opened) <= {"config.json", "pytorch_model.bin"}


def test_DSC_06_no_pattern_mixes_an_adapter_into_a_model(tmp_path: Path) -> None:
    made(tmp_path, st("model.safetensors"), junk("adapter_model.safetensors"))
    plan = loaded(tmp_path, allow_patterns_overrides=("*.safetensors",))
    assert plan.files == ("model.safetensors",)
    assert "adapter" in skipped(plan)["adapter_model.safetensors"]


def test_patterns_reach_into_the_folders_that_they_name(tmp_path: Path) -> None:
    made(tmp_path, st("model.safetensors", ZEROS))
    (tmp_path / "weights").mkdir()
    st("weights/part.safetensors")(tmp_path)
    plan = loaded(tmp_path, allow_patterns_overrides=("weights/*.safetensors",))
    assert plan.files == ("weights/part.safetensors",)


def test_the_folder_original_is_ignored_until_it_is_not(tmp_path: Path) -> None:
    made(tmp_path, st("model.safetensors", ZEROS))
    (tmp_path / "original").mkdir()
    pt("original/consolidated.00.pth")(tmp_path)
    assert LoadConfig().ignore_patterns == ("original/**/*",)
    only = ("original/*.pth",)
    with pytest.raises(NoWeightsError):
        loadkit.plan(
            tmp_path, load_format="pt", load_config=LoadConfig(allow_patterns_overrides=only)
        )
    plan = loaded(tmp_path, load_format="pt", allow_patterns_overrides=only, ignore_patterns=())
    assert plan.files == ("original/consolidated.00.pth",)


def test_ignored_files_are_not_opened_and_that_is_told(tmp_path: Path) -> None:
    made(tmp_path, st("other.safetensors"), junk("model.safetensors"))
    plan = loaded(tmp_path, ignore_patterns=("model*",))
    assert plan.files == ("other.safetensors",)
    assert skipped(plan)["model.safetensors"] == "ignore_patterns has 'model*'"


def test_a_subfolder_is_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    made(tmp_path, junk("model.safetensors"))
    made(tmp_path / "checkpoint-500", st("model.safetensors"))
    assert loaded(tmp_path, subfolder="checkpoint-500").files == ("model.safetensors",)
