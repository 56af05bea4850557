"""SmolLM2's shape from a bucket, cut over three ranks: each fetches its own bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

import loadkit
from helpers.checkpoints import llama_shapes, sparse_safetensors, write_cfg
from helpers.web_server import WebServer
from loadkit.config import LoadConfig, ParallelConfig

SIZES = {"layers": 30, "hidden": 576, "heads": 9, "kv_heads": 3, "ffn": 1536, "vocab": 49152}


@pytest.mark.slow
def test_rank_0_of_3_fetches_its_own_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "bucket" / "smollm2"
    write_cfg(
        folder,
        hidden_size=576,
        num_attention_heads=9,
        num_key_value_heads=3,
        num_hidden_layers=30,
        intermediate_size=1536,
        vocab_size=49152,
        tie_word_embeddings=True,
        torch_dtype="bfloat16",
    )
    shapes = llama_shapes(head=False, **SIZES)
    file = sparse_safetensors(
        folder / "model.safetensors", {name: ("BF16", shape) for name, shape in shapes.items()}
    )
    with WebServer(tmp_path) as web:
        monkeypatch.setenv("AWS_ENDPOINT_URL", web.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        report = loadkit.load(
            "s3://bucket/smollm2",
            parallel=ParallelConfig(tp_size=3, tp_rank=0),
            load_config=LoadConfig(stream=True),
        ).report
    size = file.stat().st_size
    assert report.bytes_needed < 0.34 * size
    assert report.bytes_fetched < report.bytes_read + 200_000
    # Rows that are cut (o and down) lie 2 KiB apart: what is between them comes along.
    assert report.read_amplification < 1.6
    assert report.bytes_read < 0.52 * size
