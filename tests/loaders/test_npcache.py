"""``npcache``: made once, outside of the checkpoint, reused, and never trusted."""

from __future__ import annotations

import json
import multiprocessing
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import loadkit
from helpers.checkpoints import llama_sd, write_cfg, write_st
from helpers.hub_server import ask_hub, hub_server
from loadkit.config import LoadConfig
from loadkit.errors import FormatError, LoadkitError, OptionError, WriteError
from loadkit_default.npcache import cache as cache_module
from loadkit_default.npcache.contents import NAMES

SD = llama_sd()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_cfg(folder)
    torch.save({**SD, "epoch": 3}, folder / "pytorch_model.bin")
    return folder


def config(tmp_path: Path, **changes: Any) -> LoadConfig:
    values = {"load_format": "npcache", "cache_dir": str(tmp_path / "cache"), **changes}
    return LoadConfig(use_tqdm_on_load=False, **values)


def tensors(folder: Path, load_config: LoadConfig) -> dict[str, torch.Tensor]:
    return dict(loadkit.iter_weights(folder, load_config=load_config))


def check(folder: Path, load_config: LoadConfig, wanted: dict[str, torch.Tensor] = SD) -> None:
    found = tensors(folder, load_config)
    assert found.keys() == wanted.keys()
    assert all(found[name].equal(value) for name, value in wanted.items())


def only_cache(tmp_path: Path) -> Path:
    (found,) = (p for p in (tmp_path / "cache/npcache").iterdir() if not p.name.startswith("."))
    return found


def numpy_file(tmp_path: Path) -> Path:
    return next(only_cache(tmp_path).glob("*.npy"))


def never(*_: Any, **__: Any) -> None:
    raise AssertionError("the checkpoint's tensors were read again")


def test_the_cache_is_made_once_outside_and_reused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(path.name for path in source.iterdir())
    check(source, config(tmp_path))
    assert sorted(path.name for path in source.iterdir()) == before
    monkeypatch.setattr(cache_module, "_bytes_of", never)
    monkeypatch.setattr("loadkit_default.loader.DefaultModelLoader._header", never)
    check(source, config(tmp_path))


def test_a_repository_of_a_hub_is_fetched_once_by_ranges(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = (source / "pytorch_model.bin").stat().st_size
    with hub_server(org__toy=source) as hub:
        ask_hub(hub, tmp_path / "home", monkeypatch)
        for first in (True, False):
            hub.requests.clear()
            result = loadkit.load("org/toy", load_config=config(tmp_path))
            assert result.model.get_parameter("model.norm.weight").equal(SD["model.norm.weight"])
            assert result.report.bytes_read == result.plan.bytes_to_read
            assert (hub.bytes_of("pytorch_model.bin") >= 0.5 * size) == first
    assert not list((tmp_path / "home").rglob("pytorch_model.bin"))


def test_a_stream_keeps_no_cache(source: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"stream keeps no local copy.*npcache"):
        loadkit.plan("s3://bucket/folder", load_config=config(tmp_path, stream=True))


def test_numpy_reads_the_files_too(source: Path, tmp_path: Path) -> None:
    check(source, config(tmp_path))
    names = json.loads((only_cache(tmp_path) / NAMES).read_text())
    assert names["skipped"] == {"epoch": "no tensor but a number"}
    flat = np.load(numpy_file(tmp_path), allow_pickle=False)
    for name, _, offset, dtype, shape in names["tensors"]:
        assert dtype == "F32" and offset % 64 == 0
        values = flat[offset : offset + SD[name].nbytes].view(np.float32).reshape(shape)
        assert np.array_equal(values, SD[name].numpy())


def test_it_is_made_of_safetensors_too_and_every_dtype_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    wanted = {
        str(dtype): torch.arange(8).to(torch.uint8).repeat(dtype.itemsize).view(dtype)
        for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.uint32, torch.complex64)
    }
    wanted |= {"turned": torch.randn(3, 4).t().contiguous(), "scalar": torch.tensor(3.0)}
    wanted |= {"empty": torch.empty(0, 3)}
    write_st(folder / "model.safetensors", wanted)
    found = tensors(folder, config(tmp_path))
    for name, value in wanted.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        assert found[name].reshape(-1).view(torch.uint8).equal(value.reshape(-1).view(torch.uint8))


def test_another_content_is_another_cache(source: Path, tmp_path: Path) -> None:
    check(source, config(tmp_path))
    changed = {**SD, "lm_head.weight": SD["lm_head.weight"] + 1}
    torch.save(changed, source / "pytorch_model.bin")
    check(source, config(tmp_path), changed)
    assert len(list((tmp_path / "cache/npcache").glob("[!.]*"))) == 2


def test_large_checkpoints_are_several_files(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "PIECE", 4096)
    check(source, config(tmp_path))
    assert len(list(only_cache(tmp_path).glob("*.npy"))) > 3


def test_models_are_views_of_the_cache_and_equal(source: Path, tmp_path: Path) -> None:
    result = loadkit.load(source, load_config=config(tmp_path))
    wanted = loadkit.load_model(source, load_config=LoadConfig(use_tqdm_on_load=False))
    assert all(
        value.equal(wanted.state_dict()[name]) for name, value in result.model.state_dict().items()
    )
    assert result.report.aliased_bytes > 0
    assert result.plan.bytes_to_read == result.report.bytes_read


def test_the_default_place_is_the_users_cache(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOADKIT_CACHE", str(tmp_path / "mine"))
    check(source, config(tmp_path, cache_dir=None))
    assert list((tmp_path / "mine/loadkit/npcache").iterdir())


def test_a_cache_inside_the_checkpoint_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="own folder"):
        tensors(source, config(tmp_path, cache_dir=str(source)))
    assert not (source / "npcache").exists()


def test_fault_27_a_folder_that_cannot_be_written_is_said(source: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file is in the way")
    with pytest.raises(WriteError):
        tensors(source, config(tmp_path))


def test_fault_27_a_file_system_without_locks_is_gone_on_with(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(cache_module.fcntl, "flock", no_locks)
    check(source, config(tmp_path))


def test_a_failure_while_it_is_made_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = cache_module._bytes_of, []

    def fails(tensor: torch.Tensor) -> Any:
        calls.append(1)
        if len(calls) == 5:
            raise loadkit.errors.ReadError("no", errno=5)
        return real(tensor)

    monkeypatch.setattr(cache_module, "_bytes_of", fails)
    with pytest.raises(LoadkitError):
        tensors(source, config(tmp_path))
    assert [p for p in (tmp_path / "cache/npcache").iterdir() if p.is_dir()] == []
    monkeypatch.setattr(cache_module, "_bytes_of", real)
    check(source, config(tmp_path))


def _make(source: str, tmp_path: str, made: Any) -> None:
    real = cache_module._lay_out

    def counted(*args: Any) -> Any:
        with made.get_lock():
            made.value += 1
        return real(*args)

    cache_module._lay_out = counted
    check(Path(source), config(Path(tmp_path)))


@pytest.mark.slow
def test_of_four_processes_one_makes_it(source: Path, tmp_path: Path) -> None:
    spawned = multiprocessing.get_context("spawn")
    made = spawned.Value("i", 0)
    crew = [
        spawned.Process(target=_make, args=(str(source), str(tmp_path), made)) for _ in range(4)
    ]
    for process in crew:
        process.start()
    for process in crew:
        process.join()
    assert [process.exitcode for process in crew] == [0] * 4 and made.value == 1


# -- hostile caches -------------------------------------------------------------------------------


def npy(descr: str = "'|u1'", shape: str = "(8,)", data: bytes = bytes(8), **parts: Any) -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    text = text.ljust(117) + b"\n"
    text = parts.get("text", text)
    length = parts.get("length") or struct.pack("<H", len(text))
    return b"\x93NUMPY" + parts.get("version", b"\x01\x00") + length + text + data


V2 = {"version": b"\x02\x00"}
BAD_FILES: dict[str, Callable[[bytes], bytes]] = {
    "N01": lambda _: npy("'|O'"),
    "N02-no-magic": lambda good: b"\x92" + good[1:],
    "N03": lambda _: npy(shape="(1000000000000,)"),
    "N04": lambda _: npy(shape="(500000000,)"),
    "N05": lambda good: good[:-1],
    "N06-structured": lambda _: npy("[('a', '<f4')]"),
    "N07": lambda _: npy(shape="(4294967296, 4294967296)"),
    "N08": lambda _: npy(text=b" " * 1_000_000, length=struct.pack("<I", 1_000_000), **V2),
    "N09": lambda _: npy(length=struct.pack("<I", 4_000_000_000), **V2),
    "N10-number-shape": lambda _: npy(shape="(8)"),
    "N10-minus": lambda _: npy(shape="(-8,)"),
    "N10-code": lambda _: npy(shape="(__import__('os').getpid(),)"),
    "N11": lambda good: good + b"x",
    "N12": lambda _: npy("'|V1000000000'"),
    "N13": lambda _: b"PK\x03\x04" + bytes(1000),
    "N14-dtype": lambda _: npy("'<f4'", "(2,)"),
    "N14-empty": lambda _: b"",
    "N14-short": lambda good: good[:11],
    "N14-version": lambda _: npy(version=b"\x09\x00"),
}


@pytest.mark.parametrize("row", BAD_FILES)
def test_a_numpy_file_that_lies_is_refused(row: str, source: Path, tmp_path: Path) -> None:
    check(source, config(tmp_path))
    path = numpy_file(tmp_path)
    path.write_bytes(BAD_FILES[row](path.read_bytes()))
    with pytest.raises(FormatError) as caught:
        tensors(source, config(tmp_path))
    assert caught.value.code == "E_NPY" and caught.value.file == path.name
    assert "remove the cache" in str(caught.value) or "remove '" in str(caught.value)


def _with(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        content = json.loads((folder / NAMES).read_text())
        change(content)
        (folder / NAMES).write_text(json.dumps(content))

    return act


def _million(content: dict[str, Any]) -> None:
    first = content["tensors"][0]
    content["tensors"] = [[str(n), *first[1:]] for n in range(1_000_001)]


BAD_NAMES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "N15-up": ("E_NAME", _with(lambda c: c["tensors"][0].__setitem__(1, "../../x"))),
    "N15-absolute": ("E_NAME", _with(lambda c: c["tensors"][0].__setitem__(1, "/etc/passwd"))),
    "N15-twice": ("E_NAME", _with(lambda c: c["tensors"].append(c["tensors"][0]))),
    "N15-no-file": (
        "E_NAME",
        _with(lambda c: c["tensors"][0].__setitem__(1, "npcache-0123456789abcdef-00009.npy")),
    ),
    "N15-million": ("E_NAME", _with(_million)),
    "N15-name-number": ("E_NAME", _with(lambda c: c["tensors"][0].__setitem__(0, 7))),
    "N15-name-escape": ("E_NAME", _with(lambda c: c["tensors"][0].__setitem__(0, "\x1b[2J"))),
    "N15-name-long": ("E_NAME", _with(lambda c: c["tensors"][0].__setitem__(0, "a" * 2000))),
    "overlap": ("E_LAYOUT", _with(lambda c: c["tensors"][1].__setitem__(2, 0))),
    "past-the-end": ("E_LAYOUT", _with(lambda c: c["tensors"][-1].__setitem__(2, 1 << 40))),
    "minus": ("E_LAYOUT", _with(lambda c: c["tensors"][0].__setitem__(2, -64))),
    "shape": ("E_LAYOUT", _with(lambda c: c["tensors"][0].__setitem__(4, [True, 2]))),
    "dtype": ("E_LAYOUT", _with(lambda c: c["tensors"][0].__setitem__(3, "O"))),
    "another-key": ("E_NAME", _with(lambda c: c.__setitem__("key", "0"))),
    "no-json": ("E_JSON", lambda folder: (folder / NAMES).write_text("{") and None),
}


@pytest.mark.parametrize("row", BAD_NAMES)
def test_a_list_of_names_that_lies_is_refused(row: str, source: Path, tmp_path: Path) -> None:
    code, act = BAD_NAMES[row]
    check(source, config(tmp_path))
    act(only_cache(tmp_path))
    with pytest.raises(FormatError) as caught:
        tensors(source, config(tmp_path))
    assert caught.value.code == code, caught.value


def test_N15_a_numpy_file_that_is_a_link_is_not_followed(source: Path, tmp_path: Path) -> None:
    check(source, config(tmp_path))
    path = numpy_file(tmp_path)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LoadkitError):
        tensors(source, config(tmp_path))


@pytest.mark.parametrize("inside", ["np", "npcache"])
def test_N16_a_ready_made_cache_in_the_repository_is_ignored(
    inside: str, source: Path, tmp_path: Path
) -> None:
    check(source, config(tmp_path))
    folder = source / inside
    os.rename(only_cache(tmp_path), folder)  # noqa: PTH104
    flat = np.load(next(folder.glob("*.npy")))
    np.save(next(folder.glob("*.npy")), np.zeros_like(flat))
    check(source, config(tmp_path))
