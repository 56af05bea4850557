"""What a plan predicts a load will hold is what it holds, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from helpers.checkpoints import write_llama

SIZES = {"hidden": 1024, "heads": 16, "kv_heads": 4, "ffn": 2816, "vocab": 8192, "layers": 8}
MIB = 1 << 20

# Each case in a process of its own that has imported everything and loaded nothing.
SCRIPT = """
import json, os, sys, torch, loadkit, loadkit.loader, loadkit_models.llama
from loadkit.config import LoadConfig, ParallelConfig
folder, warm, *cases = sys.argv[1:]

def measure(tp, dtype, options):
    torch.set_num_threads(2)
    loadkit.load(warm)  # what else is imported, thread pools
    config = LoadConfig(use_tqdm_on_load=False, **options)
    last = ParallelConfig(tp_size=tp, tp_rank=tp - 1)
    result = loadkit.load(folder, parallel=last, load_config=config, dtype=dtype)
    report = result.report
    return [result.plan.predicted_peak_bytes, report.peak["host_anonymous_bytes"],
            result.plan.bytes_to_read, report.bytes_read]

for case in cases:
    pid = os.fork()
    if not pid:
        print(json.dumps(measure(*json.loads(case))), flush=True)
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        raise SystemExit(case)
"""
CASES: dict[str, tuple[int, str, dict[str, str]]] = {
    "aliased": (1, "auto", {}),
    "owned": (1, "auto", {"alias": "never"}),
    "tp2-aliased": (2, "auto", {}),
    "tp2-owned": (2, "auto", {"alias": "never"}),
    "cast-from-the-map": (1, "bfloat16", {}),
    "tp2-cast-read": (2, "bfloat16", {"reader": "pread"}),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """Case to predicted and measured peak, bytes to read and read."""
    big, small = tmp_path_factory.mktemp("big"), tmp_path_factory.mktemp("small")
    write_llama(big, **SIZES)
    write_llama(small)
    command = [sys.executable, "-c", SCRIPT, big, small, *map(json.dumps, CASES.values())]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = map(json.loads, done.stdout.splitlines())
    return dict(zip(CASES, lines, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_the_predicted_peak_is_the_measured_one(case: str, found: dict[str, list[int]]) -> None:
    predicted, measured, planned, read = found[case]
    assert planned == read
    assert abs(measured - predicted) <= 0.05 * predicted + 32 * MIB, (predicted, measured)
