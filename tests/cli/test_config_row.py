"""The row ``config`` of a plan: of the file that the load format goes by."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file

from helpers.cli import Ran
from helpers.dcp_files import write_dcp
from helpers.mistral_files import write_mistral
from helpers.tiny_families import write_family

Run = Callable[..., Ran]


def _row(ran: Ran) -> str:
    (row,) = [line for line in ran.out.splitlines() if line.startswith("config ")]
    return row


def test_params_json_counts_and_a_config_json_beside_it_does_not(run: Run, tmp_path: Path) -> None:
    write_family(tmp_path / "hf", "mistral")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    folder = write_mistral(tmp_path / "own", weights, config)
    alone = _row(run("plan", folder))
    assert "mistral" in alone and f"hidden {config['hidden_size']}" in alone
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 4096}))
    assert _row(run("plan", folder)) == alone


def test_a_config_that_lies_elsewhere_is_shown(run: Run, tmp_path: Path) -> None:
    write_family(tmp_path / "hf", "mistral")
    write_dcp(tmp_path / "dcp", {"model": load_file(tmp_path / "hf" / "model.safetensors")})
    extra = json.dumps({"config_source": str(tmp_path / "hf")})
    ran = run("plan", tmp_path / "dcp", "--set", f"model_loader_extra_config={extra}")
    assert ran.code == 0, ran.err
    assert _row(ran) == _row(run("plan", tmp_path / "hf"))
