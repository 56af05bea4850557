"""``loadkit inspect`` on real files, honest and hostile."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from helpers.checkpoints import raw_st, write_llama, write_st
from helpers.cli import Ran

Run = Callable[..., Ran]


def test_every_tensor_is_listed_with_dtype_shape_file_offset_and_bytes(
    run: Run, tmp_path: Path
) -> None:
    state = write_llama(tmp_path, shards=2)
    found = run("inspect", tmp_path, "--json").json()
    assert found["schema"] == "loadkit.inspect/1"
    assert found["ok"] is True
    assert found["formats"] == ["safetensors"]
    assert {t["name"] for t in found["tensors"]} == set(state)
    for entry in found["tensors"]:
        tensor = state[entry["name"]]
        data = (tmp_path / entry["file"]).read_bytes()
        assert entry["dtype"] == "F32"
        assert entry["shape"] == list(tensor.shape)
        piece = bytearray(data[entry["offset"] : entry["offset"] + entry["bytes"]])
        assert torch.equal(torch.frombuffer(piece, dtype=torch.float32), tensor.flatten())


def test_files_carry_their_format_and_size(run: Run, tmp_path: Path) -> None:
    write_llama(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    found = {f["name"]: f for f in run("inspect", tmp_path, "--json").json()["files"]}
    assert found["model.safetensors"]["format"] == "safetensors"
    assert found["model.safetensors"]["tensors"] == 21
    assert found["config.json"]["format"] == "json"
    assert found["notes.txt"] == {"name": "notes.txt", "size": 5, "format": None, "tensors": None}


def test_no_model_and_no_config_are_needed(run: Run, tmp_path: Path) -> None:
    write_st(tmp_path / "x.safetensors", {"w": torch.zeros(2, 3)}, {"made by": "me"})
    ran = run("inspect", tmp_path / "x.safetensors")
    assert ran.code == 0
    assert "w     F32    [2, 3]" in ran.out
    assert "made by" in ran.out


def test_weights_that_no_installed_loader_reads_are_listed_as_files(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loadkit_default.loader.DefaultModelLoader.read_header", None)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04 never opened by a parser")
    found = run("inspect", tmp_path, "--json").json()
    assert found["formats"] == ["pt"]
    assert found["tensors"] == []


def test_a_state_dict_inside_an_archive_is_named_by_its_key(run: Run, tmp_path: Path) -> None:
    held = {"w": torch.arange(6.0).view(2, 3)}
    path = tmp_path / "last.pt"
    torch.save({"epoch": 3, "ema": held, "raw": {"v": torch.zeros(1)}}, path)
    found = run("inspect", path, "--set", "weights_key=ema", "--json").json()
    (tensor,) = found["tensors"]
    assert (tensor["name"], tensor["shape"], tensor["file"]) == ("w", [2, 3], "last.pt")
    piece = bytearray(path.read_bytes()[tensor["offset"] : tensor["offset"] + tensor["bytes"]])
    assert torch.equal(torch.frombuffer(piece, dtype=torch.float32), held["w"].flatten())
    wrong = run("inspect", path, "--set", "weights_key=emma")
    assert wrong.code == 2
    assert "emma" in wrong.err and "ema" in wrong.err


def test_a_key_that_nothing_follows_is_refused(run: Run, tmp_path: Path) -> None:
    write_llama(tmp_path)
    ran = run("inspect", tmp_path, "--set", "weights_key=ema")
    assert ran.code == 2
    assert "weights_key='ema'" in ran.err and ".pth" in ran.err


def test_UX_02_a_path_that_does_not_exist_is_named(run: Run, tmp_path: Path) -> None:
    write_llama(tmp_path / "model")
    ran = run("inspect", tmp_path / "modle", "--json")
    assert ran.code == 1
    assert ran.json()["error"]["code"] == "E_PATH"
    assert "no such file or directory" in ran.err
    assert "'model'" in ran.err


def test_a_broken_header_is_its_typed_error(run: Run, tmp_path: Path) -> None:
    header = {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}
    raw_st(tmp_path / "model.safetensors", header, b"\0" * 8)
    ran = run("inspect", tmp_path, "--json")
    assert ran.code == 1
    error = ran.json()["error"]
    assert (error["code"], error["tensor"], error["file"]) == ("E_LAYOUT", "w", "model.safetensors")


HOSTILE = [
    pytest.param("\x1b]0;pwn\x07\x1b[2J", id="S44"),
    pytest.param("<script>alert(1)</script>[bold]x[/bold]", id="S45"),
    pytest.param("a\0b", id="S47"),
    pytest.param("w\n2025-01-01 INFO all is well", id="S48"),
    pytest.param("../../../../abs/x", id="S49-up"),
    pytest.param("/abs", id="S49-abs"),
    pytest.param("C:\\x", id="S49-drive"),
    pytest.param("CON", id="S49-device"),
    pytest.param("x" * 5000, id="S49-long"),
    pytest.param("a\u202eb\u2066c", id="bidi"),
    pytest.param("a\x7f\x80\x9bb", id="c1"),
    pytest.param("l\u0430yer.weight", id="F36"),
]


@pytest.mark.parametrize("extra", [[], ["--json"], ["--debug"]], ids=["text", "json", "debug"])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tensor_names_reach_no_terminal_raw(
    run: Run, tmp_path: Path, name: str, extra: list[str]
) -> None:
    header = {name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    raw_st(tmp_path / "model.safetensors", header, b"\0" * 4)
    ran = run("inspect", tmp_path, *extra)
    ran.assert_clean()
    assert ran.code in (0, 1)
    if ran.code:
        assert "error: E_NAME: " in ran.err
    assert "\n2025" not in ran.out + ran.err
    if not extra:
        assert (ran.out + ran.err).isascii()
    if extra == ["--json"] and not ran.code:
        assert json.loads(ran.out)["tensors"][0]["name"] == name


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_metadata_reaches_no_terminal_raw(run: Run, tmp_path: Path, name: str) -> None:
    raw_st(tmp_path / "model.safetensors", {"__metadata__": {name: name}})
    run("inspect", tmp_path).assert_clean()
    run("inspect", tmp_path, "--json").assert_clean()


def test_hostile_file_names_reach_no_terminal_raw(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a\x1b[2J\n\u202e.txt").write_text("")
    ran = run("inspect", tmp_path)
    assert ran.code == 0
    ran.assert_clean()
    assert r"a\x1b[2J\n\u202e.txt" in ran.out


def test_hostile_source_reaches_no_terminal_raw(run: Run, tmp_path: Path) -> None:
    ran = run("inspect", tmp_path / "no\x1b[2J\x9b")
    assert ran.code == 1
    ran.assert_clean()


def test_settings_reach_the_source(run: Run, tmp_path: Path) -> None:
    write_llama(tmp_path / "below")
    found = run("inspect", tmp_path, "--set", "subfolder=below", "--json").json()
    assert len(found["tensors"]) == 21


def test_CFG_06_a_misspelt_setting_is_an_error_with_the_nearest(run: Run, tmp_path: Path) -> None:
    ran = run("inspect", tmp_path, "--set", "subfoldr=below")
    assert ran.code == 2
    assert "subfolder" in ran.err
