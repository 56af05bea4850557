"""What a plan predicts a load will hold is what it holds, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.checkpoints import write_llama

SIZES = {"hidden": 1024, "heads": 16, "kv_heads": 4, "ffn": 2816, "vocab": 8192, "layers": 8}
MIB = 1 << 20

SCRIPT = """
import json, sys, torch, loadkit
from loadkit.config import LoadConfig, ParallelConfig
torch.set_num_threads(2)
folder, warm, tp, dtype, options = sys.argv[1:]
loadkit.load(warm)  # imports, thread pools
config = LoadConfig(use_tqdm_on_load=False, **json.loads(options))
last = ParallelConfig(tp_size=int(tp), tp_rank=int(tp) - 1)
result = loadkit.load(folder, parallel=last, load_config=config, dtype=dtype)
print(json.dumps([result.plan.predicted_peak_bytes, result.report.peak["host_anonymous_bytes"],
                  result.plan.bytes_to_read, result.report.bytes_read]))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    big, small = tmp_path_factory.mktemp("big"), tmp_path_factory.mktemp("small")
    write_llama(big, **SIZES)
    write_llama(small)
    return big, small


@pytest.mark.parametrize(
    ("tp", "dtype", "options"),
    [
        pytest.param(1, "auto", {}, id="aliased"),
        pytest.param(1, "auto", {"alias": "never"}, id="owned"),
        pytest.param(2, "auto", {}, id="tp2-aliased"),
        pytest.param(2, "auto", {"alias": "never"}, id="tp2-owned"),
        pytest.param(1, "bfloat16", {}, id="cast-from-the-map"),
        pytest.param(2, "bfloat16", {"reader": "pread"}, id="tp2-cast-read"),
    ],
)
def test_the_predicted_peak_is_the_measured_one(
    folders: tuple[Path, Path], tp: int, dtype: str, options: dict[str, str]
) -> None:
    big, small = folders
    command = [sys.executable, "-c", SCRIPT, big, small, str(tp), dtype, json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    predicted, measured, planned, read = json.loads(done.stdout)
    assert planned == read
    assert abs(measured - predicted) <= 0.05 * predicted + 32 * MIB, (predicted, measured)
