"""Which files hold the weights: discovery, the index as untrusted data, and what errors say."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from helpers.checkpoints import (
    LFS_POINTER,
    llama_sd,
    raw_st,
    write_cfg,
    write_index,
    write_shards,
    write_sparse_llama,
    write_st,
)
from loadkit.config import LoadConfig, ModelConfig
from loadkit.detect import detect_load_format, kind_of
from loadkit.errors import (
    CheckpointError,
    FormatError,
    IndexFileError,
    LoadkitError,
    NoWeightsError,
    PathError,
)
from loadkit.sources.local import LocalSource
from loadkit_default.loader import DefaultModelLoader
from loadkit_default.weight_files import WeightFiles, find_weight_files

SD = llama_sd()


@pytest.fixture(autouse=True)
def no_descriptor_left() -> Iterator[None]:
    def descriptors() -> set[str]:
        return {path.name for path in Path("/proc/self/fd").iterdir()}

    before = descriptors()
    yield
    assert descriptors() == before


def chosen(folder: Path, load_format: str = "hf", **config: Any) -> WeightFiles:
    with LocalSource(folder, LoadConfig(**config)) as source:
        return find_weight_files(source, source.load_config, load_format)


def catalogue(
    folder: Path, load_format: str = "hf", **config: Any
) -> tuple[dict[str, torch.Tensor], DefaultModelLoader]:
    """What the loader offers, and the loader."""
    load_config = LoadConfig(load_format=load_format, **config)
    with LocalSource(folder, load_config) as source:
        loader = DefaultModelLoader(load_config)
        loader.source = source
        return dict(loader.catalogue(cast("ModelConfig", None))), loader


def values(folder: Path, **config: Any) -> dict[str, bytes]:
    """Every tensor's bytes, as the loader finds them."""
    load_config = LoadConfig(**config)
    with LocalSource(folder, load_config) as source:
        loader = DefaultModelLoader(load_config)
        loader.source = source
        return {info.name: info.file.read(info.offset, info.nbytes) for info in loader.infos()}


WANTED = {name: tensor.numpy().tobytes() for name, tensor in SD.items()}


# -- what is there -------------------------------------------------------------------------------


def test_a_single_file_is_found(tmp_path: Path) -> None:
    write_st(tmp_path / "model.safetensors", SD)
    found = chosen(tmp_path)
    assert (found.files, found.index, found.skipped) == (["model.safetensors"], None, {})
    assert values(tmp_path) == WANTED


@pytest.mark.parametrize("index", [True, False])
def test_shards_are_found_with_and_without_an_index(index: bool, tmp_path: Path) -> None:
    write_shards(tmp_path, SD, 3, index=index)
    found = chosen(tmp_path)
    assert found.files == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert (found.index is not None) is index
    assert values(tmp_path) == WANTED


def test_the_catalogue_is_lazy_and_in_file_order(tmp_path: Path) -> None:
    write_shards(tmp_path, SD, 2)
    found, loader = catalogue(tmp_path)
    assert {name: (t.dtype, t.shape) for name, t in found.items()} == {
        name: (t.dtype, t.shape) for name, t in SD.items()
    }
    places = [(info.file.name, info.offset) for info in loader.infos()]
    assert places == sorted(places)
    assert loader.weight_files is not None and loader.weight_files.why.startswith("named by")


def test_a_file_that_was_named_is_the_weights(tmp_path: Path) -> None:
    write_shards(tmp_path, SD, 2)
    write_st(tmp_path / "consolidated.fp16.safetensors", {"w": torch.zeros(1)})
    found = chosen(tmp_path / "consolidated.fp16.safetensors")
    assert found.files == ["consolidated.fp16.safetensors"]


def test_training_state_is_never_opened(tmp_path: Path) -> None:
    write_st(tmp_path / "model.safetensors", SD)
    names = ["optimizer.pt", "optimizer.safetensors", "scheduler.pt", "training_args.bin",
             "rng_state_0.pth", "scaler.pt"]  # fmt: skip
    for name in names:
        (tmp_path / name).write_bytes(b"")
        (tmp_path / name).chmod(0)
    found = chosen(tmp_path)
    assert found.files == ["model.safetensors"]
    assert set(found.skipped) == set(names)
    assert values(tmp_path) == WANTED


def test_adapters_and_rank_files_are_not_taken_for_the_model(tmp_path: Path) -> None:
    for name in ("model", "adapter_model", "model-rank-0-part-0", "model.fp16"):
        write_st(tmp_path / f"{name}.safetensors", SD)
    found = chosen(tmp_path)
    assert found.files == ["model.safetensors"]
    assert len(found.skipped) == 3 and all(found.skipped.values())


def test_ignore_patterns_and_overrides_are_obeyed(tmp_path: Path) -> None:
    for name in ("model", "other"):
        write_st(tmp_path / f"{name}.safetensors", SD)
    assert chosen(tmp_path, ignore_patterns=("model*",)).files == ["other.safetensors"]
    assert chosen(tmp_path, allow_patterns_overrides=("oth*",)).files == ["other.safetensors"]


def test_a_shard_that_the_index_names_and_a_pattern_ignores_is_told(tmp_path: Path) -> None:
    write_shards(tmp_path, SD, 2)
    with pytest.raises(IndexFileError, match="is named, and ignore_patterns has 'model-00001") as e:
        chosen(tmp_path, ignore_patterns=("model-00001*",))
    assert e.value.detail["ignored"] == ["model-00001-of-00002.safetensors"]
    assert "ignore_patterns" in str(e.value.hint)


def test_an_index_that_a_pattern_ignores_does_not_count(tmp_path: Path) -> None:
    write_shards(tmp_path, SD, 2)
    write_index(tmp_path, {"nothing": "like-this.safetensors"})
    with pytest.raises(IndexFileError):
        chosen(tmp_path)
    assert len(chosen(tmp_path, ignore_patterns=("*.index.json",)).files) == 2


def test_one_complete_set_of_shards_goes_before_an_incomplete_one(tmp_path: Path) -> None:
    write_shards(tmp_path, SD, 2, index=False)
    write_st(tmp_path / "model-00003-of-00004.safetensors", SD)
    assert len(chosen(tmp_path).files) == 2


def test_two_complete_sets_without_an_index_are_refused_and_listed(tmp_path: Path) -> None:
    write_shards(tmp_path, SD, 2, index=False)
    write_st(tmp_path / "model.safetensors", SD)
    with pytest.raises(IndexFileError, match="allow_patterns_overrides") as caught:
        chosen(tmp_path)
    assert "'model.safetensors'" in str(caught.value)
    chosen(tmp_path, allow_patterns_overrides=("model.safetensors",))


def test_a_missing_shard_without_an_index_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, SD, 3, index=False)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(IndexFileError, match="missing: 2"):
        chosen(tmp_path)


def test_a_name_in_two_files_without_an_index_is_an_error(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_st(tmp_path / f"{name}.safetensors", {"w": torch.zeros(1)})
    with pytest.raises(FormatError) as caught:
        catalogue(tmp_path)
    assert caught.value.code == "E_DUPLICATE" and caught.value.tensor == "w"


# -- development cases ---------------------------------------------------------------------------


def test_DSC_02_stale_shard_names_name_both_and_the_way_out(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path, SD, 2)
    stale = {name: file.replace("of-00002", "of-00004") for name, file in weight_map.items()}
    write_index(tmp_path, stale, total_size=1)
    with pytest.raises(IndexFileError) as caught:
        chosen(tmp_path)
    text = str(caught.value)
    assert "model-00001-of-00004.safetensors" in text
    assert "model-00001-of-00002.safetensors" in text
    assert "ignore_index" in text
    assert values(tmp_path, ignore_index=True) == WANTED


def test_DSC_02_tensors_the_index_omits_are_reported(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path, SD, 2)
    del weight_map["lm_head.weight"]
    write_index(tmp_path, weight_map)
    with pytest.raises(IndexFileError, match=r"lm_head\.weight.*does not list it"):
        catalogue(tmp_path)
    assert values(tmp_path, ignore_index=True) == WANTED


@pytest.mark.parametrize("metadata", [{}, {"total_size": 1}, {"total_size": "x"}])
def test_DSC_02_a_wrong_total_size_does_not_matter(
    metadata: dict[str, Any], tmp_path: Path
) -> None:
    write_index(tmp_path, write_shards(tmp_path, SD, 2), **metadata)
    assert values(tmp_path) == WANTED


def strays(folder: Path) -> None:
    """A zeroed model.safetensors and Mistral's own file, as some repositories have them."""
    write_st(folder / "model.safetensors", {name: torch.zeros_like(t) for name, t in SD.items()})
    names = {
        "tok_embeddings.weight": torch.ones(4, 4),
        "layers.0.attention.wq.weight": torch.ones(2),
    }
    write_st(folder / "consolidated.safetensors", names)


@pytest.mark.parametrize("load_format", ["hf", "safetensors"])
def test_DSC_03_with_an_index_only_its_files_are_read(
    load_format: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_shards(tmp_path, SD, 2)
    strays(tmp_path)
    with caplog.at_level(logging.INFO, "loadkit_default"):
        assert values(tmp_path, load_format=load_format) == WANTED
    found = chosen(tmp_path, load_format)
    assert set(found.skipped) == {"model.safetensors", "consolidated.safetensors"}
    assert "model-00001-of-00002.safetensors" in caplog.text
    assert "not read: 'consolidated.safetensors'" in caplog.text


def test_DSC_03_without_an_index_model_goes_first_and_consolidated_waits_for_mistral(
    tmp_path: Path,
) -> None:
    strays(tmp_path)
    write_st(tmp_path / "pytorch_lora.safetensors", SD)
    found = chosen(tmp_path)
    assert found.files == ["model.safetensors"]
    assert set(found.skipped) == {"consolidated.safetensors", "pytorch_lora.safetensors"}
    assert chosen(tmp_path, "mistral").files == ["consolidated.safetensors"]


def test_DSC_03_only_the_other_scheme_is_said(tmp_path: Path) -> None:
    strays(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(NoWeightsError, match=r"Mistral.*load_format='mistral'"):
        chosen(tmp_path)


def test_ST_01_a_pointer_is_named_by_the_loader(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text(LFS_POINTER)
    with pytest.raises(FormatError, match=r"Git LFS pointer.*4976698672.*git lfs pull") as caught:
        catalogue(tmp_path)
    assert caught.value.file == "model.safetensors"


def test_ST_03_a_lying_header_is_refused_by_the_loader(tmp_path: Path) -> None:
    shape = {"w": {"dtype": "F32", "shape": [16, 32], "data_offsets": [0, 512]}}
    raw_st(tmp_path / "model.safetensors", shape, b"\0" * 512)
    with pytest.raises(FormatError) as caught:
        catalogue(tmp_path)
    assert (caught.value.code, caught.value.tensor) == ("E_LAYOUT", "w")


def test_ST_04_unusual_tensors_are_offered_in_torchs_shape(tmp_path: Path) -> None:
    tensors = {
        "empty": torch.zeros(0),
        "e2": torch.zeros(2, 0, 3),
        "s": torch.tensor(0.5),
        "u16": torch.ones(2, dtype=torch.uint16),
        "e8": torch.ones(4).to(torch.float8_e8m0fnu),
        "f4": torch.zeros(2, 3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    }
    write_st(tmp_path / "model.safetensors", tensors)
    found, _ = catalogue(tmp_path)
    assert {name: (t.dtype, t.shape) for name, t in found.items()} == {
        name: (t.dtype, t.shape) for name, t in tensors.items()
    }


def test_ST_04_a_dtype_torch_lacks_is_named_with_its_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loadkit.tensor_info import torch_dtype

    write_st(tmp_path / "model.safetensors", {"w": torch.ones(4).to(torch.float8_e8m0fnu)})
    torch_dtype.cache_clear()
    monkeypatch.delattr(torch, "float8_e8m0fnu")
    with pytest.raises(FormatError, match=r"'w'.*F8_E8M0 needs a torch") as caught:
        catalogue(tmp_path)
    assert caught.value.code == "E_DTYPE"


def test_ST_05_files_without_metadata_load_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_st(tmp_path / "model.safetensors", SD)
    with caplog.at_level(logging.WARNING):
        assert values(tmp_path) == WANTED
    assert not caplog.records


def test_UX_02_no_weights_lists_patterns_files_formats_and_folders(tmp_path: Path) -> None:
    write_cfg(tmp_path)
    (tmp_path / "checkpoint-500").mkdir()
    write_st(tmp_path / "checkpoint-500" / "model.safetensors", SD)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(NoWeightsError) as caught:
        chosen(tmp_path, "safetensors")
    text = str(caught.value)
    for word in ("*.safetensors", "config.json", "checkpoint-500", "load_format='pt'",
                 "pytorch_model.bin"):  # fmt: skip
        assert word in text
    assert caught.value.code == "E_NO_WEIGHTS"
    assert caught.value.detail["subfolders"] == ["checkpoint-500"]
    assert chosen(tmp_path, subfolder="checkpoint-500").files == ["model.safetensors"]


def test_UX_02_only_a_variant_is_said(tmp_path: Path) -> None:
    write_cfg(tmp_path)
    write_st(tmp_path / "model.fp16.safetensors", SD)
    with pytest.raises(NoWeightsError, match=r"only variants are here: 'model\.fp16"):
        chosen(tmp_path)
    with pytest.raises(NoWeightsError, match="variants"):
        with LocalSource(tmp_path, LoadConfig()) as source:
            detect_load_format(source.list())


def test_UX_02_an_empty_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(NoWeightsError, match="files seen: none"):
        chosen(tmp_path)


# -- F rows: the index as untrusted data ---------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("../x.safetensors", id="F01"),
        pytest.param("/abs/x.safetensors", id="F02"),
        pytest.param("..\\x.safetensors", id="F03"),
        pytest.param("C:x.safetensors", id="F04"),
        pytest.param("\\\\srv\\x.safetensors", id="F05"),
        pytest.param("", id="F07-empty"),
        pytest.param(".", id="F07-dot"),
        pytest.param("a\0.safetensors", id="F07-nul"),
        pytest.param("a" * 5000 + ".safetensors", id="F07-long"),
        pytest.param(1, id="F08-int"),
        pytest.param(["model.safetensors"], id="F08-list"),
        pytest.param(None, id="F08-null"),
        pytest.param({}, id="F08-object"),
        pytest.param("pytorch_model.bin", id="F09"),
    ],
)
def test_a_file_name_that_is_none_is_refused(name: Any, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    write_st(tmp_path / "x.safetensors", SD)
    write_st(folder / "model.safetensors", SD)
    (folder / "pytorch_model.bin").write_bytes(b"x")
    write_index(folder, {"a": "model.safetensors", "lm_head.weight": name})
    began = time.monotonic()
    with pytest.raises(IndexFileError) as caught:
        catalogue(folder)
    assert caught.value.code == "E_INDEX"
    assert caught.value.file == "model.safetensors.index.json"
    assert "lm_head.weight" in str(caught.value) and len(str(caught.value)) < 1000
    assert str(caught.value).isprintable()
    assert time.monotonic() - began < 2


@pytest.mark.parametrize(
    "text",
    [
        pytest.param('{"weight_map":{"a":"x.safetensors","a":"y.safetensors"}}', id="F11"),
        pytest.param('{"weight_map":{},"weight_map":{}}', id="F11-weight_map"),
        pytest.param("", id="empty"),
        pytest.param("[]", id="a-list"),
        pytest.param("{}", id="no-weight_map"),
        pytest.param('{"weight_map":[]}', id="weight_map-is-a-list"),
        pytest.param('{"weight_map":{}}', id="weight_map-is-empty"),
        pytest.param('{"weight_map":' + "[" * 100_000, id="deep"),
        pytest.param('{"weight_map":{"a":' + "[]," * 200_000 + "[]}}", id="many-lists"),
        pytest.param(LFS_POINTER, id="a-pointer"),
    ],
)
def test_an_index_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    write_st(tmp_path / "model.safetensors", SD)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(IndexFileError) as caught:
        catalogue(tmp_path)
    assert caught.value.code == "E_INDEX"
    assert values(tmp_path, ignore_index=True) == WANTED


def test_F12_F13_F17_every_disagreement_of_index_and_shards_is_listed(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path, SD, 2)
    first = weight_map["model.embed_tokens.weight"]
    weight_map["nobody.has.this"] = first  # F12
    weight_map["nobody.has.that"] = first
    del weight_map["model.norm.weight"]  # F13
    moved = next(name for name, file in weight_map.items() if file != first)
    weight_map[moved] = first  # F17: another shard than it says
    write_index(tmp_path, weight_map)
    with pytest.raises(IndexFileError) as caught:
        catalogue(tmp_path)
    assert caught.value.detail["count"] == 4
    for name in ("nobody.has.this", "nobody.has.that", "model.norm.weight", moved):
        assert name in str(caught.value)


def test_F15_missing_shards_are_all_named(tmp_path: Path) -> None:
    write_shards(tmp_path, SD, 4)
    for number in (2, 4):
        (tmp_path / f"model-0000{number}-of-00004.safetensors").unlink()
    with pytest.raises(IndexFileError) as caught:
        chosen(tmp_path)
    assert caught.value.detail["missing"] == [
        f"model-0000{number}-of-00004.safetensors" for number in (2, 4)
    ]


def test_F16_a_shard_of_the_same_set_that_is_not_named_is_an_error(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path, SD, 3)
    third = "model-00003-of-00003.safetensors"
    write_index(tmp_path, {name: file for name, file in weight_map.items() if file != third})
    with pytest.raises(IndexFileError, match="not named") as caught:
        chosen(tmp_path)
    assert caught.value.detail["unlisted"] == [third]
    assert values(tmp_path, ignore_index=True) == WANTED


def test_F17_another_models_shard_is_an_error(tmp_path: Path) -> None:
    write_shards(tmp_path, SD, 2)
    write_st(tmp_path / "model-00002-of-00002.safetensors", {"other": torch.zeros(1)})
    with pytest.raises(IndexFileError) as caught:
        catalogue(tmp_path)
    assert caught.value.detail["count"] == len(SD) // 2 + 1
    assert "'other'" in str(caught.value.detail)


def test_a_second_copy_of_a_listed_tensor_is_skipped_with_its_reason(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path, SD, 2)
    second = next(file for file in weight_map.values() if file.startswith("model-00002"))
    part = {name: SD[name] for name, file in weight_map.items() if file == second}
    copy = {"model.embed_tokens.weight": torch.zeros(40, 16)}
    write_st(tmp_path / second, {**part, **copy})
    assert values(tmp_path) == WANTED
    _, loader = catalogue(tmp_path)
    assert list(loader.skipped_tensors) == [f"model.embed_tokens.weight in {second}"]


def test_F25_a_fifo_shard_is_refused_at_once(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "model.safetensors")
    began = time.monotonic()
    with pytest.raises(PathError):
        catalogue(tmp_path)
    assert time.monotonic() - began < 1


def test_F27_a_folder_named_as_the_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(PathError, match="folder"):
        catalogue(tmp_path)


def test_F36_look_alike_names_are_shown_escaped(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path, SD, 2)
    weight_map["lm_he\u0430d.weight"] = weight_map.pop("lm_head.weight")
    write_index(tmp_path, weight_map)
    with pytest.raises(IndexFileError) as caught:
        catalogue(tmp_path)
    assert "lm_he\\u0430d.weight" in str(caught.value)


# -- auto ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "load_format"),
    [
        (["model.safetensors", "pytorch_model.bin", "consolidated.safetensors"], "safetensors"),
        (["model-00001-of-00002.safetensors", "m.gguf"], "safetensors"),
        (["consolidated.00.safetensors", "params.json"], "mistral"),
        (["pytorch_model.bin", "optimizer.pt"], "pt"),
        (["m-Q4_0.gguf", "config.json"], "gguf"),
        (["model.tensors"], "tensorizer"),
        (["model-rank-0-part-0.safetensors"], "sharded_state"),
        (["__0_0.distcp", ".metadata"], "dcp"),
    ],
)
def test_auto_decides_by_the_files_and_says_why(
    files: list[str], load_format: str, tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"")
    with LocalSource(tmp_path, LoadConfig()) as source:
        found = detect_load_format(source.list())
    assert found.load_format == load_format
    assert any(name in found.why for name in files)


@pytest.mark.parametrize(
    "files", [["config.json"], ["optimizer.pt"], ["adapter_model.safetensors"]]
)
def test_auto_without_weights_is_an_error(files: list[str], tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"")
    with LocalSource(tmp_path, LoadConfig()) as source:
        with pytest.raises(NoWeightsError, match=files[0].split(".")[0]):
            detect_load_format(source.list())


def test_kinds_by_name() -> None:
    assert kind_of("model.bf16-00001-of-00002.safetensors") == "variant"
    assert kind_of("sub/model.safetensors") is None
    assert kind_of("tokenizer.json") is None


def test_a_checkpoint_of_405B_is_catalogued_from_headers_in_a_moment(tmp_path: Path) -> None:
    weight_map = write_sparse_llama(tmp_path)
    began = time.process_time()
    load_config = LoadConfig()
    with LocalSource(tmp_path, load_config) as source:
        loader = DefaultModelLoader(load_config)
        loader.source = source
        infos = loader.infos()
    assert len(infos) == len(weight_map) == 1137
    assert sum(info.nbytes for info in infos) > 800e9
    assert time.process_time() - began < 2


def test_every_error_is_a_checkpoint_error_with_a_dict(tmp_path: Path) -> None:
    write_index(tmp_path, {"w": "../x.safetensors"})
    with pytest.raises(LoadkitError) as caught:
        catalogue(tmp_path)
    assert isinstance(caught.value, CheckpointError)
    assert json.dumps(caught.value.to_dict())
