"""The numbers of the pages are those of the real model and of this code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import loadkit
from loadkit.load_plan import Row

QUERY = "encoder.layer.0.attention.self.query.weight"
QKV = "encoder.layer.0.attention.self.qkv_proj.weight"


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    return " ".join((root / "docs/how-a-load-works.md").read_text().split())


def row_of(plan: loadkit.LoadPlan, tensor: str) -> Row:
    (row,) = [row for row in plan.rows if row.tensor == tensor]
    return row


def says(page: str, *numbers: int) -> None:
    missing = [number for number in numbers if f"{number:,}" not in page]
    assert missing == []


def test_the_walk_through_a_load_tells_the_file_as_it_is(page: str, minilm: Path) -> None:
    file = minilm / "model.safetensors"
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    says(page, file.stat().st_size, size, size + 8, len(tensors))
    assert json.dumps({QUERY: tensors[QUERY]})[1:-1] in page
    start, end = tensors[QUERY]["data_offsets"]
    says(page, end - start, 8 + size + start)


def test_the_walk_through_a_load_tells_the_plan_and_the_report(page: str, minilm: Path) -> None:
    result = loadkit.load(minilm)
    plan, report, model = result.plan, result.report, result.model
    assert json.dumps(row_of(plan, QUERY).to_dict()) in page
    says(page, plan.bytes_to_read, plan.aliased_bytes, plan.bytes_to_read - plan.aliased_bytes)
    says(page, len(list(model.modules())), len(list(model.parameters())))
    for name in ("key", "value"):
        target = row_of(plan, QUERY.replace("query", name)).target
        assert target is not None
        says(page, target.offset)
    assert (
        f"bytes_needed={report.bytes_needed} bytes_read={report.bytes_read} "
        f"aliased_bytes={report.aliased_bytes} parameter_bytes={report.parameter_bytes} "
        f"skipped={report.skipped}"
    ) in page


def test_the_walk_through_a_load_tells_what_a_rank_of_two_reads(page: str, minilm: Path) -> None:
    rank = loadkit.ParallelConfig(tp_size=2, tp_rank=1)
    plan = loadkit.plan(minilm, parallel=rank)
    row = row_of(plan, QUERY)
    down = row_of(plan, "encoder.layer.0.attention.output.dense.weight")
    assert row.source is not None and row.target is not None and down.source is not None
    for region in (row.source, row.target, down.source):
        assert json.dumps(region.to_dict()) in page
    says(page, plan.bytes_needed)
