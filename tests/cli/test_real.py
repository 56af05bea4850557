"""The commands over the real line: tiny checkpoints, honest, broken and hostile."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoints import llama_sd, raw_st, st_header, write_cfg, write_llama, write_st
from helpers.cli import Ran, spawn
from loadkit.known_names import KNOWN, Known

Run = Callable[..., Ran]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A toy Llama in two files."""
    folder = tmp_path / "model"
    write_llama(folder, shards=2)
    return folder


@pytest.mark.parametrize("tp", [1, 2])
def test_a_plan_and_the_load_agree_rank_by_rank(run: Run, model: Path, tp: int) -> None:
    planned = run("plan", model, "--tp", tp, "--json")
    loaded = run("load", model, "--tp", tp, "--json")
    assert (planned.code, loaded.code) == (0, 0), planned.err + loaded.err
    plan, load = planned.json(), loaded.json()
    assert plan["ok"] is True
    assert plan["problems"] == []
    for key in ("architecture", "model_class", "distribution", "load_format"):
        assert plan[key] == load[key]
    assert plan["architecture"] == "LlamaForCausalLM"
    assert plan["distribution"] == "loadkit-models"
    assert len(plan["ranks"]) == len(load["ranks"]) == tp
    for before, after in zip(plan["ranks"], load["ranks"], strict=True):
        assert before["tp_rank"] == after["tp_rank"]
        assert before["bytes_to_read"] == after["bytes_read"]
        assert before["bytes_needed"] == after["bytes_needed"]
        assert before["parameter_bytes"] == after["parameter_bytes"]


def test_one_rank_is_the_same_as_among_all(run: Run, model: Path) -> None:
    every = run("plan", model, "--tp", 2, "--json").json()["ranks"]
    (one,) = run("plan", model, "--tp", 2, "--rank", 1, "--json").json()["ranks"]
    assert one == every[1]


def test_rows_cover_every_tensor(run: Run, model: Path) -> None:
    found = run("plan", model, "--rows", "--json").json()
    assert {row["tensor"] for row in found["rows"] if row["tensor"]} == set(llama_sd())
    for row in found["rows"]:
        assert {"tensor", "file", "source", "parameter", "target", "exact", "kind"} <= set(row)
        assert row["exact"] in ("exact", "whole", "opaque")


def test_people_see_config_class_format_and_folded_layers(run: Run, model: Path) -> None:
    shown = run("plan", model).out
    assert "llama, 2 layers, hidden 16, 4 heads, 2 kv heads, ffn 32, vocab 40" in shown
    assert "loadkit_models.llama:LlamaForCausalLM (loadkit-models)" in shown
    assert "model.layers.{0-1}.mlp.up_proj.weight" in shown
    assert "ok: every parameter is filled" in shown


def test_settings_change_the_load(run: Run, model: Path) -> None:
    ran = run("load", model, "--set", "alias=never", "--set", "reader=pread", "--json")
    (rank,) = ran.json()["ranks"]
    assert rank["reader"] == "pread"
    assert rank["aliased_bytes"] == 0


def test_a_shell_gets_the_same(model: Path) -> None:
    ran = spawn("load", model, "--json")
    assert ran.code == 0
    assert ran.err == ""
    assert ran.json()["schema"] == "loadkit.load/1"


# -- what does not fit -----------------------------------------------------------------------------


def _misshapen(folder: Path) -> None:
    state = llama_sd()
    state["model.layers.1.mlp.up_proj.weight"] = torch.zeros(31, 16)
    write_cfg(folder)
    write_st(folder / "model.safetensors", state)


@pytest.mark.parametrize("command", ["plan", "load"])
def test_UX_01_a_wrong_shape_ends_in_tensor_file_parameter_and_both_shapes(
    run: Run, tmp_path: Path, command: str
) -> None:
    _misshapen(tmp_path)
    ran = run(command, tmp_path)
    assert ran.code == 1
    assert "Traceback" not in ran.err
    for words in ("up_proj", "model.safetensors", "gate_up_proj", "[31, 16]", "32, 16]"):
        assert words in ran.err, ran.err
    assert ran.err.startswith("error: E_PLAN: 1 problem(s)")


def test_UX_01_every_problem_is_reported_at_once(run: Run, tmp_path: Path) -> None:
    _misshapen(tmp_path)
    state = llama_sd(head=False)
    del state["model.norm.weight"]
    state["model.layers.0.mlp.up_proj.weight"] = torch.zeros(32, 15)
    state["model.layers.0.stranger.weight"] = torch.zeros(3)
    write_st(tmp_path / "model.safetensors", state)
    found = run("plan", tmp_path, "--json").json()
    assert found["ok"] is False
    text = json.dumps(found["problems"])
    for name in ("lm_head", "model.norm.weight", "layers.0.mlp.up_proj", "stranger"):
        assert name in text
    for problem in found["problems"]:
        assert set(problem) == {"code", "message", "tensor", "parameter", "file", "offset", "hint"}


def test_no_strict_lets_an_unexpected_tensor_pass(run: Run, tmp_path: Path) -> None:
    write_cfg(tmp_path)
    write_st(tmp_path / "model.safetensors", {**llama_sd(), "stranger": torch.zeros(3)})
    assert run("plan", tmp_path).code == 1
    ran = run("load", tmp_path, "--no-strict", "--json")
    assert ran.code == 0
    assert "stranger" in json.dumps(ran.json()["ranks"][0]["skipped"])


def test_a_tp_that_does_not_divide_is_a_problem_that_names_the_legal_ones(
    run: Run, model: Path
) -> None:
    ran = run("plan", model, "--tp", 3, "--json")
    assert ran.code == 1
    (problem,) = ran.json()["problems"]
    assert problem["code"] == "TP_INDIVISIBLE"


def test_a_model_config_at_fault_exits_1(run: Run, tmp_path: Path) -> None:
    write_cfg(tmp_path, architectures=["NoSuchModel"])
    write_st(tmp_path / "model.safetensors", llama_sd())
    ran = run("plan", tmp_path, "--json")
    assert ran.code == 1
    assert ran.json()["error"]["code"] == "E_ARCHITECTURE"


# -- UX-02: what a user points at -----------------------------------------------------------------


@pytest.mark.parametrize("command", ["plan", "load", "inspect"])
def test_UX_02_a_misspelt_path_names_what_is_there(run: Run, model: Path, command: str) -> None:
    ran = run(command, model.parent / "modle")
    assert ran.code == 1
    assert "no such file or directory" in ran.err
    assert "'model'" in ran.err


def test_UX_02_tilde_and_relative_paths_are_expanded(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(model.parent))
    assert run("plan", "~/model").code == 0
    monkeypatch.chdir(model.parent)
    assert run("plan", "./model").code == 0
    assert run("plan", "model").code == 0
    ran = run("plan", "~/no/such/model")
    assert ran.code == 1
    assert "no such file or directory" in ran.err


def test_UX_02_a_scheme_that_nobody_reads_names_those_that_are_read(run: Run) -> None:
    ran = run("plan", "nosuch://bucket/model")
    assert ran.code == 2
    assert "nosuch" in ran.err
    assert "s3" in ran.err


def test_UX_02_an_empty_folder_says_what_was_looked_for(run: Run, tmp_path: Path) -> None:
    ran = run("plan", tmp_path)
    assert ran.code == 1
    assert "error: E_" in ran.err


def test_UX_02_weights_one_level_down_are_pointed_at(run: Run, tmp_path: Path) -> None:
    write_cfg(tmp_path)
    (tmp_path / "checkpoint-500").mkdir()
    write_st(tmp_path / "checkpoint-500" / "model.safetensors", llama_sd())
    ran = run("plan", tmp_path)
    assert ran.code == 1
    assert "checkpoint-500" in ran.err


def test_UX_02_a_load_format_that_matches_nothing_names_the_files(run: Run, tmp_path: Path) -> None:
    write_cfg(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    ran = run("plan", tmp_path, "--load-format", "safetensors")
    assert ran.code == 1
    assert "pytorch_model.bin" in ran.err


# -- names ----------------------------------------------------------------------------------------


def test_PLG_03_a_misspelt_load_format_names_the_nearest(run: Run, model: Path) -> None:
    ran = run("plan", model, "--load-format", "safetensor", "--json")
    assert ran.code == 2
    assert ran.json()["error"]["code"] == "E_UNKNOWN"
    assert "'safetensors'" in ran.err


def test_PLG_03_a_format_that_is_not_installed_says_the_pip_line(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KNOWN["loaders"], "slow_tape", Known("loadkit-slow-tape", "slow-tape"))
    ran = run("load", model, "--load-format", "slow_tape")
    assert ran.code == 2
    assert 'pip install "loadkit[slow-tape]"' in ran.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("extra", "words"),
    [('{"num_thread": 8}', "num_thread"), ("{not json", "{not json"), ("[]", "object")],
)
def test_CFG_06_a_loaders_options_are_checked(
    run: Run, model: Path, extra: str, words: str
) -> None:
    ran = run("plan", model, "--set", f"model_loader_extra_config={extra}")
    assert ran.code == 2
    assert words in ran.err
    ran.assert_clean()


HOSTILE = [
    pytest.param("\x1b]0;pwn\x07\x1b[2J", id="S44"),
    pytest.param("<script>[red]x[/red]", id="S45"),
    pytest.param("a\0b", id="S47"),
    pytest.param("w\n2025-01-01 INFO all is well", id="S48"),
    pytest.param("../../../../abs/x", id="S49"),
    pytest.param("a\u202eb.\u2066c", id="bidi"),
    pytest.param("l\u0430yer.weight", id="F36"),
]


@pytest.mark.parametrize("command", ["plan", "load"])
@pytest.mark.parametrize("extra", [[], ["--json"], ["--rows"], ["--no-strict"]], ids=str)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tensor_names_reach_no_terminal_raw(
    run: Run, tmp_path: Path, name: str, extra: list[str], command: str
) -> None:
    if command == "load" and extra == ["--rows"]:
        extra = ["--debug"]
    write_cfg(tmp_path)
    tensors: dict[str, Any] = {n: ("F32", tuple(t.shape)) for n, t in llama_sd().items()}
    body, size = st_header({**tensors, name: ("F32", (2,))})
    raw_st(tmp_path / "model.safetensors", body, b"\0" * size)
    ran = run(command, tmp_path, *extra)
    ran.assert_clean()
    assert "\n2025" not in ran.out + ran.err
    assert ran.code in (0, 1)
    assert "E_INTERNAL" not in ran.err


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_configs_reach_no_terminal_raw(run: Run, tmp_path: Path, name: str) -> None:
    write_st_folder(tmp_path)
    for changes in ({"architectures": [name]}, {"model_type": name}, {"torch_dtype": name}):
        write_cfg(tmp_path, **changes)
        for extra in ([], ["--json"]):
            ran = run("plan", tmp_path, *extra)
            ran.assert_clean()
            assert "\n2025" not in ran.out + ran.err
            assert "E_INTERNAL" not in ran.err


def write_st_folder(folder: Path) -> None:
    write_st(folder / "model.safetensors", llama_sd())


def test_a_file_that_cannot_be_read_is_an_io_error(run: Run, model: Path) -> None:
    if os.geteuid() == 0:
        shutil.rmtree(model)
        model.symlink_to("/proc/1/task/1/mem-that-is-not")
        assert run("plan", model).code in (1, 3)
        return
    (model / "config.json").chmod(0)
    ran = run("plan", model, "--json")
    assert ran.code == 3
    assert ran.json()["error"]["code"] == "E_IO"
