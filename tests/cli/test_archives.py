"""``inspect``, ``plan`` and ``convert`` on folders of ``.bin`` files."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from helpers.checkpoints import llama_sd, write_cfg
from helpers.cli import Ran

Run = Callable[..., Ran]
SD = llama_sd()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "bin"
    found.mkdir()
    write_cfg(found)
    torch.save({**SD, "step": 7}, found / "pytorch_model.bin")
    torch.save(argparse.Namespace(lr=1e-4), found / "training_args.bin")
    return found


def test_inspect_lists_what_an_archive_holds(run: Run, folder: Path) -> None:
    ran = run("inspect", folder, "--json")
    assert ran.code == 0, ran.err
    document = ran.json()
    assert {each["name"] for each in document["tensors"]} == SD.keys()
    data = (folder / "pytorch_model.bin").read_bytes()
    for each in document["tensors"]:
        wanted = SD[each["name"]].numpy().tobytes()
        assert data[each["offset"] : each["offset"] + each["bytes"]] == wanted
    assert document["metadata"]["pytorch_model.bin"]["format"] == "torch zip"


def test_inspect_does_not_open_training_state(run: Run, folder: Path) -> None:
    ran = run("inspect", folder, "--json")
    counts = {file["name"]: file["tensors"] for file in ran.json()["files"]}
    assert counts["training_args.bin"] is None and counts["pytorch_model.bin"] == len(SD)


def test_plan_says_the_format_and_what_is_skipped(run: Run, folder: Path) -> None:
    ran = run("plan", folder, "--json", "--tp", 2)
    assert ran.code == 0, ran.err
    assert ran.json()["load_format"] == "pt"


def test_convert_makes_safetensors_of_an_archive(run: Run, folder: Path, tmp_path: Path) -> None:
    import loadkit

    ran = run("convert", folder, tmp_path / "out")
    assert ran.code == 0, ran.err
    found = dict(loadkit.iter_weights(tmp_path / "out"))
    assert found.keys() == SD.keys() and all(found[name].equal(SD[name]) for name in SD)
    ran = run("diff", folder, tmp_path / "out")
    assert ran.code == 0, ran.out + ran.err
