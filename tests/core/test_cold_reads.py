"""What loads take from a cold disk: every rank its own bytes, all ranks together the file once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.checkpoints import write_llama
from helpers.cold import disk_bytes, evict
from helpers.extents import content, expected, extent, held
from loadkit.config import LoadConfig
from loadkit.readers.base import Reader
from loadkit.readers.mmap import MmapReader
from loadkit.readers.pread import PreadReader
from loadkit.readers.rows import COLD_GAP
from loadkit.sources.local_file import LocalFile

MIB = 1 << 20
SIZE = 64 * MIB


@pytest.fixture
def cold(tmp_path: Path) -> LocalFile:
    path = tmp_path / "cold.bin"
    path.write_bytes(content(MIB) * (SIZE // MIB))
    evict(path)
    before = disk_bytes()
    path.read_bytes()
    if disk_bytes() == before:
        pytest.skip("reads of this disk are not counted")
    evict(path)
    return LocalFile("cold.bin", str(path))


def test_views_of_a_cold_file_bring_their_own_bytes_and_no_others(cold: LocalFile) -> None:
    reader = MmapReader(LoadConfig())
    wanted = [(offset, MIB) for offset in range(MIB, SIZE, 8 * MIB)]
    for place in wanted:
        reader.expect_view(cold, *place)
    before = disk_bytes()
    views = [reader.view(cold, *place) for place in wanted]
    total = sum(int(view[::4096].sum()) for view in views)
    assert total > 0
    assert disk_bytes() - before <= 1.02 * len(wanted) * MIB
    reader.close()
    cold.close()


@pytest.mark.parametrize("kind", [PreadReader, MmapReader], ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    ("row_bytes", "stride", "most"),
    [
        pytest.param(MIB, 8 * MIB, 1.02, id="dim 0"),
        pytest.param(64 << 10, 512 << 10, 1.1, id="rows far apart"),
    ],
)
def test_an_eighth_of_a_cold_file_takes_an_eighth_from_the_disk(
    cold: LocalFile, kind: type[Reader], row_bytes: int, stride: int, most: float
) -> None:
    reader = kind(LoadConfig())
    rows = SIZE // stride
    wanted = [extent(cold, stride // 2, row_bytes, rows, stride)]
    before = disk_bytes()
    assert reader.read(wanted) == rows * row_bytes
    assert disk_bytes() - before <= most * rows * row_bytes
    reader.close()
    cold.close()


@pytest.mark.parametrize("kind", [PreadReader, MmapReader], ids=lambda kind: kind.name)
def test_near_rows_of_a_cold_file_come_by_large_reads_and_are_right(
    cold: LocalFile, kind: type[Reader]
) -> None:
    stride = 2048 + COLD_GAP // 2
    wanted = extent(cold, 1000, 2048, 1000, stride)
    reader = kind(LoadConfig())
    assert reader.read([wanted]) == 1000 * 2048
    assert held(wanted) == expected(Path(cold.path).read_bytes(), wanted)
    reader.close()
    cold.close()


RANK = """
import json, sys, torch, loadkit
from helpers.cold import disk_bytes
folder, tp, rank, reader = sys.argv[1:]
parallel = loadkit.ParallelConfig(tp_size=int(tp), tp_rank=int(rank))
print("ready", flush=True)
sys.stdin.readline()
before = disk_bytes()
config = loadkit.LoadConfig(reader=reader, use_tqdm_on_load=False)
result = loadkit.load(folder, parallel=parallel, load_config=config)
touched = sum(p.view(-1).view(torch.uint8)[::4096].sum().item() for p in result.model.parameters())
assert result.report.bytes_read == result.plan.bytes_to_read
print(json.dumps(disk_bytes() - before))
"""


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["auto", "pread"])
@pytest.mark.parametrize("tp", [2, 4])
def test_all_ranks_together_take_a_cold_checkpoint_from_the_disk_once(
    tmp_path: Path, tp: int, reader: str
) -> None:
    write_llama(tmp_path, hidden=1024, heads=16, kv_heads=4, ffn=2816, vocab=8192, layers=4)
    files = list(tmp_path.glob("*.safetensors"))
    command = [sys.executable, "-c", RANK, str(tmp_path), str(tp)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), reader],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
        )
        for rank in range(tp)
    ]
    for rank in ranks:
        assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
    evict(*files)
    taken = [json.loads(rank.communicate("\n")[0]) for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks)
    size = sum(file.stat().st_size for file in files)
    if not sum(taken):
        pytest.skip("reads of this disk are not counted")
    assert sum(taken) <= 1.02 * size
    assert sum(taken) >= 0.9 * size  # they did take it from the disk
