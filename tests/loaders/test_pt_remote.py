"""An archive behind a web server: planned from its directory and its pickle, streamed by ranges."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import loadkit
from helpers.checkpoints import llama_sd, write_cfg
from helpers.web_server import WebServer
from loadkit.config import LoadConfig, ParallelConfig

SIZES = {"hidden": 240, "heads": 6, "kv_heads": 3, "ffn": 480, "vocab": 3000}
CONFIG = {
    "hidden_size": 240, "num_attention_heads": 6, "num_key_value_heads": 3,
    "intermediate_size": 480, "vocab_size": 3000,
}  # fmt: skip


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with WebServer(tmp_path) as server:
        yield server


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before-1.6"])
def test_a_rank_fetches_what_the_archive_says_of_itself_and_its_own_bytes(
    zipped: bool, web: WebServer
) -> None:
    folder = web.folder / "m"
    folder.mkdir()
    write_cfg(folder, **CONFIG)
    path = folder / "pytorch_model.bin"
    torch.save(llama_sd(**SIZES), path, _use_new_zipfile_serialization=zipped)
    parallel, config = ParallelConfig(tp_size=3, tp_rank=1), LoadConfig(stream=True)
    plan = loadkit.plan(f"{web.url}/m", parallel=parallel, load_config=config)
    most = 300_000 if zipped else 100_000 + 65_536 * 21  # its counts lie between the tensors
    assert plan.ok and 0 < plan.bytes_fetched < most < path.stat().st_size
    result = loadkit.load(f"{web.url}/m", parallel=parallel, load_config=config)
    local = loadkit.load_model(folder, parallel=parallel)
    for (name, mine), (_, theirs) in zip(
        result.model.named_parameters(), local.named_parameters(), strict=True
    ):
        assert torch.equal(mine, theirs), name
    assert result.report.reader == "range"
    assert result.report.bytes_read == plan.bytes_to_read
