"""How much memory a conversion takes: what is read at once, not the model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import loadkit
from helpers.checkpoints import write_llama
from helpers.converting import ENVIRON

MIB = 1 << 20
BUDGET = 64 * MIB

SCRIPT = """
import json, sys
import torch
import loadkit
from loadkit.report import PeakMeter
torch.set_num_threads(2)
warm, source, target, options = sys.argv[1:]
options = json.loads(options)
quiet = loadkit.LoadConfig(use_tqdm_on_load=False)
loadkit.convert(warm, target + "-warm", load_config=quiet, **options)  # imports, thread pools
with PeakMeter() as meter:
    report = loadkit.convert(source, target, load_config=quiet, **options)
print(json.dumps([meter.peak()["host_anonymous_bytes"], report.total_size, report.seconds]))
"""


def peak_of(folder: Path, source: Path, **options: object) -> tuple[int, int, float]:
    """Anonymous bytes at most above the start, bytes of the target, and seconds."""
    write_llama(folder / "warm")
    command = [sys.executable, "-c", SCRIPT, folder / "warm", source, folder / "out"]
    done = subprocess.run(
        [*command, json.dumps(options)], capture_output=True, text=True, env=ENVIRON
    )
    assert not done.returncode, done.stderr
    peak, size, seconds = json.loads(done.stdout)
    return peak, size, seconds


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 600 MiB in bfloat16; its largest tensor has 96 MiB."""
    import torch

    folder = tmp_path_factory.mktemp("large")
    write_llama(
        folder,
        dtype=torch.bfloat16,
        hidden=1536,
        heads=16,
        kv_heads=4,
        ffn=4096,
        vocab=32768,
        layers=9,
        shards=3,
    )
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="names-of-the-model"),
        pytest.param({"names": "checkpoint"}, id="tensor-by-tensor"),
        pytest.param({"dtype": "float32"}, id="cast"),
        pytest.param({"to": "sharded_state", "tp": 4}, id="sharded-tp4"),
    ],
)
def test_a_conversion_holds_its_budget_and_no_model(
    tmp_path: Path, large: Path, options: dict[str, object]
) -> None:
    total = sum(path.stat().st_size for path in large.glob("*.safetensors"))
    assert total > 600 * MIB
    peak, size, _ = peak_of(tmp_path, large, **options)
    assert size > 600 * MIB
    assert peak <= BUDGET + 48 * MIB, f"{peak / MIB:.0f} MiB"


@pytest.mark.slow
def test_back_from_ranks_and_compared_within_the_same_bounds(tmp_path: Path, large: Path) -> None:
    loadkit.convert(large, tmp_path / "ranks", to="sharded_state", tp=2)
    peak, _, _ = peak_of(tmp_path, tmp_path / "ranks")
    assert peak <= BUDGET + 48 * MIB, f"{peak / MIB:.0f} MiB"
    assert loadkit.diff(large, tmp_path / "out").equal
