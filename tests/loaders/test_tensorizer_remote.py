"""Tensorizer files of a remote source: headers by ranges for a plan, parts for a rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import loadkit
from helpers.checkpoints import llama_sd, write_cfg
from helpers.tensorizer_files import write_tensors
from helpers.web_server import WebServer
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.errors import IntegrityError

pytest.importorskip("loadkit_remote")
SIZES = {"hidden": 64, "ffn": 1024, "vocab": 4000, "layers": 2}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    folder = tmp_path_factory.mktemp("served")
    model = folder / "m"
    write_tensors(model / "model.tensors", llama_sd(**SIZES))
    write_cfg(model, hidden_size=64, intermediate_size=1024, vocab_size=4000)
    with WebServer(folder) as web:
        yield model, f"{web.url}/m/model.tensors"


def quiet(**extra: object) -> LoadConfig:
    return LoadConfig(
        load_format="tensorizer",
        use_tqdm_on_load=False,
        stream=True,
        model_loader_extra_config=extra,
    )


def test_a_plan_reads_headers_and_a_load_is_the_local_one(served: tuple[Path, str]) -> None:
    folder, url = served
    local = loadkit.load(folder, load_config=LoadConfig(use_tqdm_on_load=False)).model
    found = loadkit.load(url, load_config=quiet())
    for (name, one), (_, other) in zip(
        found.model.named_parameters(), local.named_parameters(), strict=True
    ):
        assert torch.equal(one, other), name
    assert found.report.verified["compared_bytes"] == found.report.bytes_needed
    assert {row.exact for row in found.plan.rows if row.parameter} == {"exact"}
    assert loadkit.plan(url, load_config=quiet()).ok


def test_what_its_own_hashes_verify_is_not_called_unverified(served: tuple[Path, str]) -> None:
    config = replace(quiet(), verify="digest")
    report = loadkit.load(served[1], load_config=config).report
    assert report.verified["compared_bytes"] == report.bytes_needed
    assert report.warnings == []


def test_a_rank_fetches_its_own_part(served: tuple[Path, str]) -> None:
    _, url = served
    whole = loadkit.load(url, load_config=quiet(verify_hash=False)).report
    parallel = ParallelConfig(tp_size=2, tp_rank=1)
    part = loadkit.load(url, parallel=parallel, load_config=quiet(verify_hash=False)).report
    assert part.bytes_read < 0.7 * whole.bytes_read
    assert part.bytes_fetched < whole.bytes_fetched


def test_a_flipped_bit_is_found_behind_http_too(served: tuple[Path, str], tmp_path: Path) -> None:
    data = bytearray((served[0] / "model.tensors").read_bytes())
    data[-5000] ^= 1
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.tensors").write_bytes(data)
    (tmp_path / "m" / "config.json").write_bytes((served[0] / "config.json").read_bytes())
    with WebServer(tmp_path) as web, pytest.raises(IntegrityError) as caught:
        loadkit.load(f"{web.url}/m/model.tensors", load_config=quiet())
    assert caught.value.code == "E_HASH"
