"""Load format dcp: which tensors are the model's, how they are read, written and shown."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldProperties
from torch.distributed.checkpoint.filesystem import SerializationFormat

import loadkit
from helpers.checkpoints import llama_sd, write_cfg
from helpers.dcp_files import (
    CONFIG,
    SIZES,
    check_equal,
    edited,
    plain_folder,
    trainer_folder,
    write_dcp,
)
from helpers.web_server import WebServer
from loadkit.cli import main
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.errors import (
    ConfigFileError,
    FormatError,
    NoWeightsError,
    OptionError,
)

DCP = LoadConfig(load_format="dcp", use_tqdm_on_load=False)
FEW = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4)}


def names_in(folder: Path, **options: Any) -> set[str]:
    config = LoadConfig(load_format="dcp", use_tqdm_on_load=False, **options)
    return {name for name, _ in loadkit.iter_weights(folder, load_config=config)}


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return llama_sd(**SIZES)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, weights: dict[str, torch.Tensor]) -> Path:
    return plain_folder(tmp_path_factory.mktemp("plain"), weights)


@pytest.fixture
def folder(tmp_path: Path, weights: dict[str, torch.Tensor]) -> Path:
    """A trainer's checkpoint."""
    return trainer_folder(tmp_path / "m", weights)


# -- which tensors -------------------------------------------------------------------------------


def test_auto_takes_a_folder_of_distcp_files(folder: Path, plain: Path) -> None:
    result = loadkit.load(folder)
    check_equal(result.model, loadkit.load_model(plain))
    assert result.report.skipped["optim"] == "21 tensor(s) of the training's state"
    assert result.report.skipped["step"] == "no tensor, and never unpickled"


@pytest.mark.parametrize(
    ("state", "key", "names"),
    [
        pytest.param(FEW, None, {"a", "b"}, id="flat"),
        pytest.param({"model": FEW}, None, {"a", "b"}, id="one dict"),
        pytest.param({"app": {"model": FEW, "optimizer": FEW}}, None, {"a", "b"}, id="app state"),
        pytest.param({**FEW, "optimizer": {"state.a": FEW["a"]}}, None, {"a", "b"}, id="beside"),
        pytest.param({"model": FEW, "optim": {"state.a.exp_avg": FEW["a"]}}, None, {"a", "b"},
                     id="flat optimizer"),
        pytest.param({"model": FEW, "ema": {"a": FEW["a"]}}, "ema", {"a"}, id="of two"),
        pytest.param({"app": {"model": FEW, "ema": FEW}}, "app/model", {"a", "b"}, id="a path"),
        pytest.param({"model": {"layers": [FEW, FEW]}}, "model",
                     {"layers.0.a", "layers.0.b", "layers.1.a", "layers.1.b"}, id="a list"),
        pytest.param({"model.a": FEW["a"], "model.b": FEW["b"]}, "model", {"a", "b"}, id="prefix"),
    ],
)  # fmt: skip
def test_the_dict_that_counts(
    state: dict[str, Any], key: str | None, names: set[str], tmp_path: Path
) -> None:
    write_dcp(tmp_path / "m", state)
    assert names_in(tmp_path / "m", weights_key=key) == names


def test_without_the_planners_mapping_names_are_all_there_is(tmp_path: Path) -> None:
    write_dcp(tmp_path / "m", {"model": FEW, "optim": {"state.a.exp_avg": FEW["a"]}})
    with edited(tmp_path / "m") as metadata:
        metadata.planner_data = None
    assert names_in(tmp_path / "m") == {"model.a", "model.b"}
    assert names_in(tmp_path / "m", weights_key="model") == {"a", "b"}


def test_of_two_dicts_none_is_guessed(tmp_path: Path) -> None:
    write_dcp(tmp_path / "m", {"model": FEW, "ema": FEW})
    with pytest.raises(FormatError, match="2 dicts hold tensors: 'model', 'ema'") as caught:
        names_in(tmp_path / "m")
    assert caught.value.code == "E_STRUCTURE"
    assert caught.value.hint == "say which by weights_key='model'"


def test_an_optimizers_folder_is_refused(tmp_path: Path) -> None:
    write_dcp(tmp_path / "m", {"optimizer": {"state": {"a": {"exp_avg": FEW["a"]}}}})
    with pytest.raises(FormatError, match=r"none of its 1 tensor.* under 'optimizer'"):
        names_in(tmp_path / "m")


def test_a_key_that_is_not_there_names_the_nearest(folder: Path) -> None:
    with pytest.raises(OptionError, match="dicts are under 'model', 'optim'") as caught:
        names_in(folder, weights_key="modle")
    assert caught.value.hint == "did you mean 'model'?"


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    write_dcp(tmp_path / "m", {"model": {"a.b": FEW["a"], "c": FEW["b"]}})
    with edited(tmp_path / "m") as metadata:
        metadata.planner_data = {"model.a.b": ("model", "a"), "model.c": ("model", "a")}
    with pytest.raises(FormatError, match="are both 'a'") as caught:
        names_in(tmp_path / "m")
    assert caught.value.code == "E_DUPLICATE"


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_the_metadata_may_be_a_pickle_of_any_protocol_since_2(
    protocol: int, tmp_path: Path
) -> None:
    write_dcp(tmp_path / "m", {"model": FEW, "step": 3})
    with edited(tmp_path / "m", protocol) as metadata:
        assert metadata.storage_meta is not None  # a path is in it
    assert names_in(tmp_path / "m") == {"a", "b"}


def test_the_metadata_of_older_versions_is_read(tmp_path: Path) -> None:
    """Properties of another class, the least that a version has said of itself, no mapping."""
    write_dcp(tmp_path / "m", FEW)
    with edited(tmp_path / "m") as metadata:
        for name, entry in metadata.state_dict_metadata.items():
            entry.properties = OldProperties(dtype=FEW[name].dtype)
        del metadata.storage_meta, metadata.version, metadata.planner_data
    assert b"_shard.sharded_tensor.metadata" in (tmp_path / "m" / ".metadata").read_bytes()
    assert names_in(tmp_path / "m") == {"a", "b"}


# -- how they are read ---------------------------------------------------------------------------


def test_safetensors_inside_of_distcp_files_are_read(
    tmp_path: Path, weights: dict[str, torch.Tensor], plain: Path
) -> None:
    """What torch writes so its own reader of folders cannot read."""
    write_dcp(
        tmp_path / "m", {**weights, "step": 3}, thread_count=2,
        serialization_format=SerializationFormat.SAFETENSORS,
    )  # fmt: skip
    write_cfg(tmp_path / "m", **CONFIG)
    for rank in range(3):
        parallel = ParallelConfig(tp_size=3, tp_rank=rank)
        found = loadkit.load(tmp_path / "m", parallel=parallel, load_config=DCP)
        check_equal(found.model, loadkit.load_model(plain, parallel=parallel))
        assert {row.exact for row in found.plan.rows if row.parameter} == {"exact"}


def test_strides_in_an_item_are_followed(tmp_path: Path) -> None:
    turned = torch.arange(12.0).view(3, 4).t()
    write_dcp(tmp_path / "m", {"a": turned, "b": FEW["b"]})
    found = dict(loadkit.iter_weights(tmp_path / "m", load_format="dcp"))
    assert torch.equal(found["a"], turned)


def test_a_rank_reads_its_own_bytes(folder: Path, plain: Path) -> None:
    for rank in range(3):
        parallel = ParallelConfig(tp_size=3, tp_rank=rank)
        found = loadkit.load(folder, parallel=parallel, load_config=DCP)
        wanted = loadkit.load(plain, parallel=parallel)
        assert found.report.bytes_needed == wanted.report.bytes_needed
        assert found.report.bytes_read == found.plan.bytes_to_read
        check_equal(found.model, wanted.model)


def test_a_checksum_of_the_archive_is_compared(folder: Path) -> None:
    config = LoadConfig(load_format="dcp", verify="digest", use_tqdm_on_load=False)
    assert loadkit.load(folder, load_config=config).report.verified
    with edited(folder) as metadata:
        place = next(p for i, p in metadata.storage_data.items() if "embed_tokens" in i.fqn)
    path = folder / place.relative_path
    data = bytearray(path.read_bytes())
    data[place.offset + place.length // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(loadkit.LoadkitError) as caught:
        loadkit.load(folder, load_config=config)
    assert (caught.value.code, caught.value.file) == ("E_CRC", place.relative_path)


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with WebServer(tmp_path) as server:
        yield server


def test_a_remote_plan_reads_what_items_say_of_themselves_and_a_load_its_own_bytes(
    web: WebServer,
) -> None:
    sizes = {"hidden": 240, "heads": 6, "kv_heads": 3, "ffn": 960, "vocab": 6000}
    folder = write_dcp(web.folder / "m", {"model": llama_sd(**sizes)})
    write_cfg(folder, **{**CONFIG, "hidden_size": 240, "intermediate_size": 960,
                         "vocab_size": 6000})  # fmt: skip
    parallel, config = ParallelConfig(tp_size=3, tp_rank=1), LoadConfig(stream=True)
    plan = loadkit.plan(f"{web.url}/m", parallel=parallel, load_config=config)
    size = (folder / "__0_0.distcp").stat().st_size
    assert plan.ok and 0 < plan.bytes_fetched < size / 80
    assert len([one for one in web.requests if one.name == "__0_0.distcp"]) < 21
    result = loadkit.load(f"{web.url}/m", parallel=parallel, load_config=config)
    check_equal(result.model, loadkit.load_model(folder, parallel=parallel))
    assert result.report.bytes_read == plan.bytes_to_read


def test_a_folder_on_the_web_is_found_by_its_metadata_and_downloaded_for_a_load(
    web: WebServer, weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of its files are in no list."""
    monkeypatch.setenv("LOADKIT_CACHE", str(web.folder / "cache"))
    folder = write_dcp(web.folder / "m", {"model": weights}, single_file_per_rank=False)
    write_cfg(folder, **CONFIG)
    result = loadkit.load(f"{web.url}/m")
    check_equal(result.model, loadkit.load_model(folder))
    assert result.report.load_format == "dcp"
    assert result.report.reader != "range"


# -- the config ----------------------------------------------------------------------------------


def test_without_a_config_the_error_says_where_one_goes(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ConfigFileError, match="does not say of what model") as caught:
        loadkit.load(folder)
    assert "config_source" in str(caught.value.hint)
    assert caught.value.file == "config.json"


def test_the_config_may_lie_elsewhere(folder: Path, plain: Path) -> None:
    (folder / "config.json").unlink()
    config = LoadConfig(load_format="dcp", model_loader_extra_config={"config_source": str(plain)})
    check_equal(loadkit.load_model(folder, load_config=config), loadkit.load_model(plain))


def test_CFG_06_an_unknown_option_is_refused(folder: Path) -> None:
    config = LoadConfig(load_format="dcp", model_loader_extra_config={"config_sorce": "x"})
    with pytest.raises(OptionError, match="config_sorce"):
        loadkit.load(folder, load_config=config)


# -- for people ----------------------------------------------------------------------------------


def test_inspect_lists_boxes_by_the_metadata_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "__0_0.distcp").write_bytes(b"")
    assert main(["inspect", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["formats"] == ["dcp"]
    assert len(found["tensors"]) == 42
    row = next(one for one in found["tensors"] if one["name"] == "model.model.norm.weight")
    assert (row["dtype"], row["shape"], row["file"]) == ("F32", [48], "__0_0.distcp")
    assert found["metadata"][".metadata"]["version"] == "1.0.0"


def test_inspect_follows_weights_key(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder), "--json", "--set", "weights_key=model"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["tensors"]) == 21
    assert "model.norm.weight" in {row["name"] for row in found["tensors"]}


def test_a_folder_without_metadata_says_so(folder: Path) -> None:
    (folder / ".metadata").unlink()
    for named in (folder, folder / "__0_0.distcp"):
        with pytest.raises(FormatError, match=r"and no \.metadata, which says what is") as caught:
            loadkit.load(named)
        assert "name the folder" in str(caught.value.hint)
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(NoWeightsError):
        loadkit.load(folder, load_config=DCP)


def test_what_the_hugging_face_writer_leaves_is_plain_safetensors(
    tmp_path: Path, weights: dict[str, torch.Tensor], plain: Path
) -> None:
    import warnings

    names = dict.fromkeys(weights, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = dcp.HuggingFaceStorageWriter(str(tmp_path / "m"), fqn_to_index_mapping=names)
        dcp.save(dict(weights), storage_writer=writer, no_dist=True)
    shutil.copy(plain / "config.json", tmp_path / "m")
    result = loadkit.load(tmp_path / "m")
    check_equal(result.model, loadkit.load_model(plain))
