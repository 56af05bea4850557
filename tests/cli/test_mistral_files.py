"""The commands on Mistral's own files: they say what they say of Hugging Face's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

import loadkit
from helpers.checkpoints import write_llama
from helpers.cli import Ran
from helpers.mistral_files import to_mistral, write_mistral
from helpers.web_server import WebServer
from loadkit.config import LoadConfig, ParallelConfig

Run = Callable[..., Ran]
LETTERS = [*(chr(ord("a") + i) for i in range(26)), *"0123456789", *"ABCD"]


class Both(NamedTuple):
    """One model in both layouts."""

    hf: Path
    own: Path
    weights: dict[str, torch.Tensor]
    config: dict[str, Any]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    root = tmp_path_factory.mktemp("mistral")
    weights = write_llama(root / "hf", architectures=["MistralForCausalLM"], sliding_window=None)
    config = json.loads((root / "hf/config.json").read_text())
    write_mistral(root / "own", weights, config, shards=2)
    model = {"type": "BPE", "vocab": {c: i for i, c in enumerate(LETTERS)}, "merges": []}
    text = json.dumps({"version": "1.0", "added_tokens": [], "model": model})
    for name in ("hf", "own"):
        (root / name / "tokenizer.json").write_text(text)
    return Both(root / "hf", root / "own", weights, config)


def test_generate_says_the_same(run: Run, both: Both) -> None:
    said = [
        run("generate", folder, "--prompt", "abc", "--max-new-tokens", 6, "--json")
        for folder in (both.own, both.hf)
    ]
    assert [one.code for one in said] == [0, 0]
    found, wanted = (one.json() for one in said)
    assert found["output_ids"] == wanted["output_ids"] and found["text"] == wanted["text"]


def test_plan_and_load_name_the_format_and_why(run: Run, both: Both) -> None:
    plan = run("plan", both.own, "--tp", 2, "--rows", "--json").json()
    assert plan["ok"] and plan["load_format"] == "mistral"
    assert plan["architecture"] == "MistralForCausalLM"
    tensors = {row["tensor"] for row in plan["rows"]} - {None}
    assert tensors == to_mistral(both.weights, both.config).keys()
    assert run("load", both.own, "--json").code == 0


def test_inspect_and_verify_show_the_files_own_names(run: Run, both: Both) -> None:
    shown = run("inspect", both.own, "--json").json()
    names = {tensor["name"] for tensor in shown["tensors"]}
    assert names == to_mistral(both.weights, both.config).keys()
    assert run("verify", both.own, "--json").json()["ok"]


def test_convert_writes_hugging_faces_layout(run: Run, both: Both, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ran = run("convert", both.own, out, "--names", "model", "--json")
    assert ran.code == 0, ran.err
    found: dict[str, torch.Tensor] = {}
    for file in out.glob("*.safetensors"):
        found |= load_file(file)
    assert found.keys() == both.weights.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in both.weights.items())


def test_a_remote_folder_is_planned_by_headers_and_streamed(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("loadkit_remote")
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with WebServer(both.own) as web:
        parallel = ParallelConfig(tp_size=2, tp_rank=1)
        config = LoadConfig(stream=True, use_tqdm_on_load=False)
        plan = loadkit.plan(web.url, parallel=parallel, load_config=config)
        assert plan.ok and plan.load_format == "mistral"
        found = loadkit.load(web.url, parallel=parallel, load_config=config)
    wanted = loadkit.load_model(both.hf, parallel=parallel)
    have = dict(found.model.named_parameters())
    for name, parameter in wanted.named_parameters():
        assert torch.equal(have[name], parameter), name
