"""Archives of ``torch.save``: what is read of them, equal to torch's values, byte for byte."""

from __future__ import annotations

import argparse
import json
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import loadkit
from helpers.bad_pt import FLOATS, archive, legacy, one_tensor
from helpers.checkpoints import llama_sd, write_cfg, write_st
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.errors import (
    CheckpointError,
    FormatError,
    IndexFileError,
    NoWeightsError,
    OptionError,
)
from loadkit.sources.base import File
from loadkit.sources.local import LocalSource
from loadkit.torch_archive.tensors import Archive
from loadkit_default.loader import DefaultModelLoader
from loadkit_default.pt.archive import read_archive

SD = llama_sd()
QUIET = {"use_tqdm_on_load": False}


def read(path: Path, weights_key: str | None = None) -> Archive:
    with LocalSource(path, LoadConfig()) as source:
        return read_archive(source.open(path.name), weights_key)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def check_equal(source: Path, wanted: dict[str, torch.Tensor], **config: Any) -> None:
    """Names, dtypes, shapes, bits, and memory of each tensor's own."""
    found = dict(loadkit.iter_weights(source, load_config=LoadConfig(**config)))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        have = found[name]
        assert (have.dtype, have.shape) == (tensor.dtype, tensor.shape), name
        assert bits(have) == bits(tensor), name
        assert have.is_contiguous() and have.untyped_storage().nbytes() == have.nbytes


def params(folder: Path, tp: int = 1, rank: int = 0, **config: Any) -> dict[str, torch.Tensor]:
    result = loadkit.load(
        folder, parallel=ParallelConfig(tp_size=tp, tp_rank=rank),
        load_config=LoadConfig(**QUIET, **config),
    )  # fmt: skip
    assert result.plan.bytes_to_read == result.report.bytes_read
    return dict(result.model.state_dict())


def check_same_model(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys() and all(value.equal(b[name]) for name, value in a.items())


# -- values ---------------------------------------------------------------------------------------

DTYPES = [
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8",
    "uint16", "uint32", "uint64", "bool", "complex64", "complex128", "float8_e4m3fn",
    "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip
zipped = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before-1.6"])


@zipped
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_is_read(name: str, zipped: bool, tmp_path: Path) -> None:
    dtype = getattr(torch, name)
    whole = torch.arange(48, dtype=torch.uint8).fmod(2 if name == "bool" else 251)
    whole = whole.repeat(dtype.itemsize * 2)[: 24 * dtype.itemsize].view(dtype)
    wanted = {"m": whole.reshape(4, 6), "scalar": whole[3].clone(), "none": whole[:0].clone()}
    torch.save(wanted, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    check_equal(tmp_path / "a.pt", wanted)


@zipped
def test_PT_02_views_own_exactly_their_bytes(zipped: bool, tmp_path: Path) -> None:
    big = torch.randn(1000, 100)
    wanted = {
        "w": big[:2], "v": big[2:4], "t": big.t()[:3], "steps": big[::7, 1::3],
        "wide": big[:1].expand(5, 100), "turned": big.view(10, 100, 100).permute(2, 0, 1)[4:9],
        "one": big[3, 4], "column": big[:, 5], "nothing": big[:0],
    }  # fmt: skip
    path = tmp_path / "pytorch_model.bin"
    torch.save(wanted, path, _use_new_zipfile_serialization=zipped)
    check_equal(path, wanted)
    archive = read(path)
    assert set(archive.odd) == {"t", "steps", "wide", "turned", "column"}


def test_PT_02_a_strided_tensor_is_loaded_saved_and_cut(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 4, bias=False)
            self.b = nn.Linear(4, 6, bias=False)

    weight = torch.randn(6, 4)
    torch.save({"a.weight": weight.t(), "b.weight": weight}, tmp_path / "m.pt")
    module = Two()
    plan = loadkit.load_into(module, tmp_path / "m.pt").plan
    assert module.a.weight.equal(weight.t()) and module.b.weight.equal(weight)
    assert {row.exact for row in plan.rows} == {"exact"}
    loadkit.save(module, tmp_path / "saved")
    assert dict(loadkit.iter_weights(tmp_path / "saved"))["a.weight"].equal(weight.t())


def test_a_strided_tensors_slice_reads_its_own_bytes(tmp_path: Path) -> None:
    write_cfg(tmp_path)
    turned = {
        name: value.t().contiguous().t() if value.dim() == 2 else value
        for name, value in SD.items()
    }
    torch.save(turned, tmp_path / "pytorch_model.bin")
    straight = tmp_path / "straight"
    straight.mkdir()
    write_cfg(straight)
    torch.save(SD, straight / "pytorch_model.bin")
    for rank in range(2):
        check_same_model(params(tmp_path, 2, rank), params(straight, 2, rank))
    plans = [
        loadkit.plan(folder, parallel=ParallelConfig(tp_size=2, tp_rank=1))
        for folder in (tmp_path, straight)
    ]
    assert plans[0].bytes_needed == plans[1].bytes_needed


@pytest.mark.parametrize("name", ["float32", "float64", "bfloat16", "int16", "complex64", "uint8"])
def test_P55_big_endian_numbers_are_turned_around(name: str, tmp_path: Path) -> None:
    dtype = getattr(torch, name)
    values = torch.arange(24).to(dtype).reshape(4, 6)
    wanted = {"m": values, "t": values.t(), "scalar": values[1, 2].clone()}
    try:
        torch.serialization.set_default_load_endianness(None)
        torch.save(wanted, tmp_path / "little.pt")
    finally:
        torch.serialization.set_default_load_endianness(None)
    unit = dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize
    import zipfile

    with (
        zipfile.ZipFile(tmp_path / "little.pt") as old,
        zipfile.ZipFile(tmp_path / "big.pt", "w") as new,
    ):
        for entry in old.infolist():
            data = old.read(entry)
            if "/data/" in entry.filename:
                data = b"".join(data[i : i + unit][::-1] for i in range(0, len(data), unit))
            elif entry.filename.endswith("/byteorder"):
                data = b"big"
            new.writestr(entry.filename, data)
    check_equal(tmp_path / "big.pt", wanted)


def test_parameters_attributes_and_metadata_are_taken_as_tensors(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.randn(3))
    parameter.note = "kept by torch"  # type: ignore[attr-defined]
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).state_dict()
    torch.save(OrderedDict(plain, own=parameter), tmp_path / "m.pth")
    check_equal(tmp_path / "m.pth", {**plain, "own": parameter.data})


# -- which dict -----------------------------------------------------------------------------------


def test_what_is_no_tensor_is_listed_as_skipped(tmp_path: Path) -> None:
    torch.save(
        {"w": torch.ones(2), "epoch": 3, "name": "x", "list": [torch.ones(1)], "rate": 0.5,
         "inner": {"a": 1}, "yes": True, "none": None, "size": torch.ones(2, 3).shape},
        tmp_path / "m.pt",
    )  # fmt: skip
    archive = read(tmp_path / "m.pt")
    assert [info.name for info in archive.tensors] == ["w"]
    assert archive.skipped == {
        "epoch": "no tensor but a number", "name": "no tensor but a string",
        "list": "no tensor but a list", "rate": "no tensor but a number",
        "inner": "no tensor but a dict of 1", "yes": "no tensor but True",
        "none": "no tensor but None", "size": "no tensor but a tuple",
    }  # fmt: skip


def test_the_only_dict_with_tensors_is_entered_and_said(tmp_path: Path) -> None:
    state = {"state_dict": {"w": torch.ones(2)}, "epoch": 1, "optimizer_states": [{"state": {}}]}
    torch.save(state, tmp_path / "m.ckpt.pt")
    archive = read(tmp_path / "m.ckpt.pt")
    assert archive.metadata["weights_key"] == "state_dict"
    assert archive.skipped["epoch"] == "beside 'state_dict': a number"


def test_of_two_dicts_with_tensors_none_is_guessed(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save({"model": {"w": torch.ones(2)}, "ema": {"w": torch.zeros(2)}}, path)
    with pytest.raises(FormatError, match=r"'model' \(1 tensors\), 'ema'") as caught:
        read(path)
    assert caught.value.code == "E_STRUCTURE" and "weights_key" in str(caught.value)
    check_equal(path, {"w": torch.zeros(2)}, weights_key="ema")


def test_a_path_of_keys_leads_deeper(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save({"a": {"b": {"w": torch.ones(2)}, "c": 1}, "x": torch.ones(1)}, path)
    assert read(path).skipped["a"] == "no tensor but a dict of 2"
    archive = read(path, "a/b")
    assert [info.name for info in archive.tensors] == ["w"]
    assert archive.skipped == {"x": "beside 'a': a tensor", "a/c": "beside 'b': a number"}


def test_tensors_that_are_deeper_are_told_with_their_key(tmp_path: Path) -> None:
    """Dicts in dicts are not searched; whose key is not given is told it, and can give it."""
    path = tmp_path / "m.pt"
    inner: dict[str, Any] = {"sd": {"w": torch.zeros(2)}}
    inner["again"] = inner
    torch.save({"epoch": 3, "model": inner, "ema": {"x": {}}}, path)
    for given in (None, "model"):
        with pytest.raises(FormatError) as caught:
            read(path, given)
        assert caught.value.hint == "tensors are deeper in it: weights_key='model/sd' (1 tensors)"
    check_equal(path, {"w": torch.zeros(2)}, weights_key="model/sd")


def test_a_weights_key_without_archives_is_refused(tmp_path: Path) -> None:
    write_st(tmp_path / "model.safetensors", SD)
    with pytest.raises(OptionError, match="weights_key"):
        list(loadkit.iter_weights(tmp_path, load_config=LoadConfig(weights_key="model")))


# -- pt_load_map_location -------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["cpu", "cuda:0", {"cuda:1": "cuda:0"}, {"cuda:99": "cpu"}])
def test_a_map_location_is_accepted_and_weights_go_where_the_load_puts_them(
    given: Any, tmp_path: Path
) -> None:
    (tmp_path / "m.pt").write_bytes(archive(one_tensor(location="cuda:99")))
    config = LoadConfig(pt_load_map_location=given)
    ((_, tensor),) = loadkit.iter_weights(tmp_path / "m.pt", load_config=config)
    assert tensor.device.type == "cpu"


@pytest.mark.parametrize(
    ("given", "device"),
    [("cuda:0", "cpu"), ({"cuda:1": "cuda:1"}, "cuda:0"), ("nowhere at all", None),
     ("nonsense", None), ({"?": "cpu"}, None)],
)  # fmt: skip
def test_a_map_location_that_contradicts_the_device_is_refused(
    given: Any, device: str | None, tmp_path: Path
) -> None:
    (tmp_path / "m.pt").write_bytes(archive(one_tensor()))
    config = LoadConfig(pt_load_map_location=given, device=device)
    with pytest.raises(OptionError, match="pt_load_map_location"):
        list(loadkit.iter_weights(tmp_path / "m.pt", load_config=config))


# -- folders --------------------------------------------------------------------------------------


def write_bin_shards(folder: Path, sd: dict[str, torch.Tensor], count: int = 2) -> dict[str, str]:
    weight_map = {}
    for number in range(count):
        name = f"pytorch_model-{number + 1:05d}-of-{count:05d}.bin"
        part = dict(list(sd.items())[number::count])
        torch.save(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    return weight_map


def write_bin_index(folder: Path, weight_map: dict[str, str]) -> None:
    content = {"metadata": {}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(content))


@pytest.mark.parametrize("load_format", ["auto", "hf", "pt"])
@pytest.mark.parametrize("index", [True, False])
def test_shards_are_read_with_and_without_an_index(
    index: bool, load_format: str, tmp_path: Path
) -> None:
    weight_map = write_bin_shards(tmp_path, SD)
    if index:
        write_bin_index(tmp_path, weight_map)
    check_equal(tmp_path, SD, load_format=load_format)


def test_the_index_says_which_copy_counts(tmp_path: Path) -> None:
    weight_map = write_bin_shards(tmp_path, SD)
    first = tmp_path / "pytorch_model-00001-of-00002.bin"
    double = next(name for name, file in weight_map.items() if file != first.name)
    part = {name: value for name, value in SD.items() if weight_map[name] == first.name}
    torch.save({**part, double: torch.zeros_like(SD[double])}, first)
    with pytest.raises(FormatError) as caught:
        check_equal(tmp_path, SD)
    assert caught.value.code == "E_DUPLICATE"
    write_bin_index(tmp_path, weight_map)
    check_equal(tmp_path, SD)


def test_an_index_that_does_not_fit_lists_all(tmp_path: Path) -> None:
    weight_map = write_bin_shards(tmp_path, SD)
    (tmp_path / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(IndexFileError, match="missing: 2"):
        check_equal(tmp_path, SD)
    write_bin_index(tmp_path, weight_map)
    with pytest.raises(IndexFileError, match="is named and missing"):
        check_equal(tmp_path, SD)


def test_F09_an_index_of_safetensors_names_no_bin(tmp_path: Path) -> None:
    weight_map = write_bin_shards(tmp_path, SD)
    content = {"metadata": {}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
    with pytest.raises(IndexFileError):
        check_equal(tmp_path, SD, load_format="hf")


def test_DSC_05_safetensors_go_first_and_formats_are_never_mixed(tmp_path: Path) -> None:
    write_cfg(tmp_path)
    write_st(tmp_path / "model.safetensors", SD)
    torch.save({k: torch.zeros_like(v) for k, v in SD.items()}, tmp_path / "pytorch_model.bin")
    (tmp_path / "original").mkdir()
    torch.save({"tok": torch.zeros(1)}, tmp_path / "original" / "consolidated.00.pth")
    for load_format in ("auto", "hf"):
        check_equal(tmp_path, SD, load_format=load_format)
    loader = DefaultModelLoader(LoadConfig(load_format="hf"))
    with LocalSource(tmp_path, LoadConfig()) as source:
        loader.source = source
        list(loader.catalogue(None))  # type: ignore[arg-type]
    assert loader.files == ["model.safetensors"]
    assert loader.skipped_files == {"pytorch_model.bin": "safetensors go first"}


@pytest.mark.parametrize("load_format", ["auto", "hf", "pt"])
def test_DSC_07_P64_training_files_are_never_opened(load_format: str, tmp_path: Path) -> None:
    write_cfg(tmp_path)
    torch.save(SD, tmp_path / "pytorch_model.bin")
    torch.save(argparse.Namespace(lr=1e-4), tmp_path / "training_args.bin")
    torch.save({"state": {0: {"exp_avg": torch.zeros(2)}}}, tmp_path / "optimizer.pt")
    torch.save({"last_epoch": 3}, tmp_path / "scheduler.pt")
    for name in ("rng_state.pth", "rng_state_0.pth", "optimizer.bin", "random_states_0.pt"):
        torch.save(torch.zeros(8, dtype=torch.uint8), tmp_path / name)
    before = {path: path.stat().st_atime_ns for path in tmp_path.iterdir()}
    for path in before:
        if path.name.startswith(("training", "optim", "sched", "rng", "random")):
            path.unlink()
            path.mkdir()  # opening it would be an error
    check_equal(tmp_path, SD, load_format=load_format)


def test_pt_is_not_fallen_back_to_where_that_is_not_wanted(tmp_path: Path) -> None:
    torch.save(SD, tmp_path / "pytorch_model.bin")
    with pytest.raises(NoWeightsError, match=r"load_format='pt' would read 'pytorch_model\.bin'"):
        check_equal(tmp_path, SD, load_format="hf", fall_back_to_pt=False)


def test_pytorch_models_files_go_before_others(tmp_path: Path) -> None:
    torch.save(SD, tmp_path / "pytorch_model.bin")
    for name in ("other.bin", "consolidated.00.pth", "model.pt", "pytorch_model.fp16.bin"):
        torch.save({"x": torch.ones(1)}, tmp_path / name)
    check_equal(tmp_path, SD)
    check_equal(tmp_path, {"x": torch.ones(1)}, allow_patterns_overrides=("oth*.bin",))
    check_equal(tmp_path / "model.pt", {"x": torch.ones(1)})


def test_a_parser_is_chosen_by_the_name_alone(tmp_path: Path) -> None:
    write_st(tmp_path / "pytorch_model.bin", SD)
    with pytest.raises(FormatError, match="its content is a safetensors file") as caught:
        check_equal(tmp_path, SD)
    assert caught.value.code == "E_FORMAT"
    torch.save(SD, tmp_path / "model.safetensors")
    with pytest.raises(FormatError) as caught:
        check_equal(tmp_path / "model.safetensors", SD)
    assert caught.value.code == "E_FORMAT"


class Evil:
    """Opens a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


@pytest.mark.parametrize("load_format", ["auto", "hf", "pt", "npcache"])
def test_SEC_01_nothing_of_an_archive_is_ever_run(
    load_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "load", None)
    write_cfg(tmp_path)
    marker = tmp_path / "PWNED"
    torch.save({"w": torch.ones(1), "x": Evil(marker)}, tmp_path / "pytorch_model.bin")
    cache = None if load_format != "npcache" else str(tmp_path.parent / "sec-cache")
    config = LoadConfig(load_format=load_format, cache_dir=cache)
    with pytest.raises(CheckpointError) as caught:
        loadkit.load(tmp_path, load_config=config)
    assert caught.value.code == "E_PICKLE" and "io open" in str(caught.value)
    assert not marker.exists()


# -- whole loads ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2])
@zipped
def test_Q_05_a_model_is_the_same_as_from_safetensors(
    zipped: bool, tp: int, tmp_path: Path
) -> None:
    one, two = tmp_path / "bin", tmp_path / "st"
    for folder in (one, two):
        folder.mkdir()
        write_cfg(folder)
    torch.save(SD, one / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    write_st(two / "model.safetensors", SD)
    for rank in range(tp):
        check_same_model(params(one, tp, rank), params(two, tp, rank))


def test_NM_06_wrapped_names_in_a_bin_are_found(tmp_path: Path) -> None:
    for name, prefix in (("wrapped", "_orig_mod.module."), ("plain", "")):
        (tmp_path / name).mkdir()
        write_cfg(tmp_path / name)
        named = {prefix + key: value for key, value in SD.items()}
        torch.save(named, tmp_path / name / "pytorch_model.bin")
    check_same_model(params(tmp_path / "wrapped"), params(tmp_path / "plain"))


@pytest.mark.parametrize("threads", [1, 4])
def test_threads_read_ahead_of_the_caller_here_too(threads: int, tmp_path: Path) -> None:
    write_bin_shards(tmp_path, SD)
    extra = {"enable_multithread_load": True, "num_threads": threads}
    check_equal(tmp_path, SD, model_loader_extra_config=extra)


def test_a_changed_archive_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cfg(tmp_path)
    path = tmp_path / "pytorch_model.bin"
    torch.save(SD, path)
    from loadkit import loader

    make_plan = loader.make_plan

    def planned(*args: Any) -> Any:
        made = make_plan(*args)
        path.write_bytes(path.read_bytes()[:-100])
        return made

    monkeypatch.setattr(loader, "make_plan", planned)
    with pytest.raises(loadkit.LoadkitError) as caught:
        loadkit.load(tmp_path)
    assert caught.value.code in ("E_CHANGED", "E_TRUNCATED")
    assert caught.value.file == "pytorch_model.bin"


class Remote(File):
    """A file that is read by requests, and counts them."""

    def __init__(self, data: bytes) -> None:
        self.name, self.size, self.data, self.asked = "m.bin", len(data), data, 0

    def read(self, offset: int, nbytes: int) -> bytes:
        assert offset >= 0 and offset + nbytes <= self.size
        self.asked += 1
        return self.data[offset : offset + nbytes]

    def check_unchanged(self) -> None: ...
    def close(self) -> None: ...


@pytest.mark.parametrize("numel", [1, 1000])
def test_a_remote_archives_records_are_found_without_a_request_for_each(
    numel: int, tmp_path: Path
) -> None:
    path = tmp_path / "m.bin"
    torch.save({f"w{n}": torch.full((numel,), float(n)) for n in range(300)}, path)
    remote = Remote(path.read_bytes())
    found = read_archive(remote)
    assert remote.asked < 15
    local = read(path)
    places = [(info.name, info.offset) for info in found.tensors]
    assert places == [(info.name, info.offset) for info in local.tensors]


def test_a_remote_archive_of_another_alignment_is_read_right(tmp_path: Path) -> None:
    from torch.utils.serialization import config

    path = tmp_path / "m.bin"
    with config.patch("save.storage_alignment", 4096):
        torch.save({f"w{n}": torch.full((3,), float(n)) for n in range(9)}, path)
    remote = Remote(path.read_bytes())
    for info in read_archive(remote).tensors:
        wanted = torch.full((3,), float(info.name[1:])).numpy().tobytes()
        assert remote.data[info.offset : info.offset + info.nbytes] == wanted


def test_a_remote_archive_that_is_laid_out_otherwise_has_its_headers_read() -> None:
    remote = Remote(archive(one_tensor(), {"data/0": FLOATS, "data/1": bytes(100)}))
    (info,) = read_archive(remote).tensors
    assert remote.data[info.offset :].startswith(FLOATS)


def test_a_pickle_longer_than_the_first_window_is_read(tmp_path: Path) -> None:
    wanted = {f"layer.{number}.weight": torch.full((2,), float(number)) for number in range(2000)}
    path = tmp_path / "m.bin"
    torch.save(wanted, path, _use_new_zipfile_serialization=False)
    check_equal(path, wanted)


def test_a_damaged_storage_of_an_old_file_names_its_tensor(tmp_path: Path) -> None:
    (tmp_path / "m.bin").write_bytes(legacy(storages=((4, FLOATS[:-1]),)))
    with pytest.raises(FormatError) as caught:
        read(tmp_path / "m.bin")
    assert (caught.value.code, caught.value.tensor) == ("E_LAYOUT", "w")
    shutil.rmtree(tmp_path)
