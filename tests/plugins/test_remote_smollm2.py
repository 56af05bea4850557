"""SmolLM2's shape from a bucket, cut over three ranks: each fetches its own bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.checkpoints import llama_shapes, sparse_safetensors, write_cfg
from helpers.web_server import WebServer
from loadkit.cli import main
from loadkit.safetensors_format import read_header
from loadkit.sources.local_file import LocalFile

SIZES = {"layers": 30, "hidden": 576, "heads": 9, "kv_heads": 3, "ffn": 1536, "vocab": 49152}
ROWS_CUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens")


@pytest.fixture
def smollm2_shape(tmp_path: Path) -> Path:
    """The folder ``bucket/smollm2``; its file is sparse, 270 MB long."""
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
    sparse_safetensors(
        folder / "model.safetensors", {name: ("BF16", shape) for name, shape in shapes.items()}
    )
    return folder


def asked(web: WebServer) -> list[tuple[int, int]]:
    """Ranges of the weight file that were asked for, but for its start: [first byte, end)."""
    found = []
    for noted in web.requests:
        low, _, high = noted.asked.get("range", "").removeprefix("bytes=").partition("-")
        if noted.name == "model.safetensors" and low not in ("", "0"):
            found.append((int(low), int(high) + 1))
    return found


def test_rank_0_of_3_fetches_its_own_bytes(
    smollm2_shape: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = smollm2_shape / "model.safetensors"
    size = file.stat().st_size
    with WebServer(tmp_path) as web:
        monkeypatch.setenv("AWS_ENDPOINT_URL", web.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        arguments = ["load", "s3://bucket/smollm2", "--tp", "3", "--rank", "0", "--json"]
        assert main([*arguments, "--set", "stream=true"]) == 0
        sent = web.sent()
    (report,) = json.loads(capsys.readouterr().out)["ranks"]
    assert report["bytes_needed"] < 0.34 * size
    assert report["bytes_fetched"] <= sent < report["bytes_read"] + 200_000
    # Rows that are cut (o and down) lie 2 KiB apart: what is between them comes along.
    assert report["read_amplification"] < 1.6
    assert report["bytes_read"] < 0.52 * size
    opened = LocalFile("model.safetensors", str(file))
    tensors = read_header(opened).tensors
    opened.close()
    ranges = asked(web)
    for info in tensors:  # of what is cut by rows, the other ranks' rows are not asked for
        if any(part in info.name for part in ROWS_CUT):
            own, end = info.offset + info.nbytes // 3, info.offset + info.nbytes
            others = [(a, b) for a, b in ranges if a < end and b > own]
            assert others == [], info.name
