"""DSC-06: an adapter is never taken for a model, alone or beside one."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import loadkit
from helpers.checkpoints import write_llama
from loadkit.cli import main
from loadkit.errors import NoWeightsError

PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"
LORA = {f"{PREFIX}.lora_A.weight": torch.ones(2, 16), f"{PREFIX}.lora_B.weight": torch.ones(16, 2)}
PEFT = {"peft_type": "LORA", "base_model_name_or_path": "org/base"}


def adapter(folder: Path, kind: str, config: str) -> None:
    folder.mkdir(exist_ok=True)
    if kind == "safetensors":
        save_file(LORA, folder / "adapter_model.safetensors")
    else:
        torch.save(LORA, folder / "adapter_model.bin")
    (folder / "adapter_config.json").write_text(config)


@pytest.mark.parametrize("call", [loadkit.plan, loadkit.load])
@pytest.mark.parametrize("load_format", ["auto", "safetensors", "hf", "pt"])
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_DSC_06_an_adapter_alone_names_its_base_model(
    kind: str, load_format: str, call: Any, tmp_path: Path
) -> None:
    adapter(tmp_path, kind, json.dumps(PEFT))
    with pytest.raises(NoWeightsError, match=r"PEFT adapter for 'org/base', not a model") as caught:
        call(tmp_path, load_format=load_format)
    assert caught.value.file == f"adapter_model.{kind}"
    assert caught.value.detail["base_model_name_or_path"] == "org/base"


def test_DSC_06_it_is_said_in_a_folder_with_a_config_of_the_base_too(tmp_path: Path) -> None:
    write_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    adapter(tmp_path, "safetensors", json.dumps(PEFT))
    for load_format in ("auto", "safetensors"):
        with pytest.raises(NoWeightsError, match="PEFT adapter for 'org/base'"):
            loadkit.plan(tmp_path, load_format=load_format)


@pytest.mark.parametrize(
    "config", ["{", "[]", "{}", '{"base_model_name_or_path": 7}', '{"base_model_name_or_path": ""}']
)
def test_DSC_06_a_broken_config_does_not_hide_it(config: str, tmp_path: Path) -> None:
    adapter(tmp_path, "safetensors", config)
    with pytest.raises(NoWeightsError, match="this is a PEFT adapter, not a model"):
        loadkit.plan(tmp_path)


def test_DSC_06_a_name_from_a_config_reaches_no_terminal_raw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter(tmp_path, "safetensors", json.dumps({"base_model_name_or_path": "a\x1b[2J\n\u202e"}))
    assert main(["plan", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert r"PEFT adapter for 'a\x1b[2J\n\u202e'" in told
    assert told.isascii() and "\x1b" not in told


@pytest.mark.parametrize("load_format", ["auto", "safetensors", "hf"])
def test_DSC_06_beside_a_model_it_is_left_out_and_that_is_told(
    load_format: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = write_llama(tmp_path)
    adapter(tmp_path, "safetensors", json.dumps(PEFT))
    with caplog.at_level(logging.INFO, "loadkit_default"):
        result = loadkit.load(tmp_path, load_format=load_format)
    weight = result.model.get_parameter("model.layers.0.mlp.down_proj.weight")
    assert torch.equal(weight, state["model.layers.0.mlp.down_proj.weight"])
    (skipped,) = [one for one in result.plan.skipped_files if "adapter_model" in str(one)]
    assert "an adapter, not a model" in str(skipped)
    assert "not read: 'adapter_model.safetensors'" in caplog.text
    assert not [row for row in result.plan.rows if "lora" in (row.tensor or "")]
