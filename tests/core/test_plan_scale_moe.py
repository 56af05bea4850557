"""Plans of a mixture of DeepSeek-V3's size from headers alone: what ranks read, skip, and cost."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.deepseek_shaped import (
    deepseek_config,
    deepseek_shaped,
    deepseek_shapes,
    plan_ranks,
    write_deepseek_shaped,
)
from loadkit.tensor_info import DTYPES

RANKS = 8
WHOLE = re.compile(r"q_a_proj|kv_a_proj|norm\.|mlp\.gate\.")  # what every rank holds whole
CPU_SECONDS = 60.0  # of the process, all ranks together
RESIDENT_BYTES = 1.5 * 2**30

# What a fresh process runs for the whole size: it prints one JSON line.
ALL_RANKS = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
from helpers.deepseek_shaped import plan_ranks, register_deepseek_shaped
register_deepseek_shaped()
before = time.process_time()
ranks = plan_ranks(sys.argv[2], 8)
status = open("/proc/self/status").read()
print(json.dumps({
    "seconds": time.process_time() - before,
    # VmHWM begins anew with a program; ru_maxrss would count what its parent held.
    "resident": int(status.partition("VmHWM:")[2].split()[0]) << 10,
    "ranks": ranks,
}))
"""


def check(ranks: list[dict[str, Any]], config: dict[str, Any]) -> None:
    """Every rank's numbers against the names and shapes of the checkpoint."""
    shapes = deepseek_shapes(config)
    E, layers = config["n_routed_experts"], config["num_hidden_layers"]
    further = sum(name.startswith(f"model.layers.{layers}.") for name in shapes)
    moe_layers = layers - config["first_k_dense_replace"]
    elsewhere = moe_layers * 6 * (E - E // RANKS)
    placed = len(shapes) - further - elsewhere
    for rank in ranks:
        assert rank["ok"] and rank["exact"]
        assert rank["elsewhere"] == elsewhere
        assert rank["skipped"] == elsewhere + further
        assert rank["rows"] == rank["tensors"] == placed
        assert rank["needed"] == rank["to_read"]
    # An expert is read by one rank, what is cut in parts by all, what is replicated by each.
    own = {n: e for n, e in shapes.items() if not n.startswith(f"model.layers.{layers}.")}
    times = {n: RANKS if WHOLE.search(n) else 1 for n in own}
    total = sum(times[name] * nbytes(entry) for name, entry in own.items())
    assert sum(rank["needed"] for rank in ranks) == total
    for rank in ranks[:-1]:  # the last one has the vocabulary's padding
        assert rank["needed"] == rank["parameters"]


def nbytes(entry: tuple[str, tuple[int, ...]]) -> int:
    dtype, shape = entry
    total = DTYPES[dtype][0] // 8
    for size in shape:
        total *= size
    return total


def test_all_ranks_of_a_small_one_are_planned(tmp_path: Path) -> None:
    write_deepseek_shaped(tmp_path, layers=4, experts=16, files=5)
    with deepseek_shaped():
        check(plan_ranks(tmp_path, RANKS), deepseek_config(4, 16))


def test_the_whole_one_has_the_tensors_and_files_of_deepseek_v3(tmp_path: Path) -> None:
    shapes = deepseek_shapes(deepseek_config())
    assert len(shapes) == 91_991
    assert shapes["model.layers.60.mlp.experts.255.down_proj.weight"] == ("F8_E4M3", (7168, 2048))
    assert shapes["model.layers.3.self_attn.kv_a_proj_with_mqa.weight_scale_inv"] == (
        "F32",
        (5, 56),
    )
    assert 685e9 < sum(map(nbytes, shapes.values())) < 690e9
    write_deepseek_shaped(tmp_path, layers=4, experts=8, files=7)
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) == 7
    assert sum(file.stat().st_blocks for file in files) * 512 < 1 << 20


@pytest.mark.slow
def test_all_ranks_of_deepseek_v3_s_size_are_planned_within_their_costs(tmp_path: Path) -> None:
    write_deepseek_shaped(tmp_path)
    tests = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", ALL_RANKS, tests, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(f"\n{found['seconds']:.1f} s of CPU, {found['resident'] / 2**20:.0f} MiB resident")
    check(found["ranks"], deepseek_config())
    assert found["resident"] < RESIDENT_BYTES
    assert found["seconds"] < CPU_SECONDS
