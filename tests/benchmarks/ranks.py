"""Ranks as real processes that load at the same time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.dense import loadkit_fused, vllm_way

__all__ = ["group", "loadkit_fused", "variants", "vllm_way"]

Go = Callable[[], Any]
HERE = Path(__file__).resolve().parent


def group(call: str, tp: int, with_store: bool = False, **args: Any) -> Go:
    """``tp`` ranks of ``call``, prepared before, started at the same moment.

    Figures: of the slowest and the largest rank, and bytes from storage of all ranks together.
    """
    meeting = Path(tempfile.mkdtemp()) / "store"
    children = []
    for rank in range(tp):
        spec = {"call": call, "args": {**args, "tp": tp}, "rank": rank, "world": tp}
        if with_store:
            spec["store"] = str(meeting)
        children.append(
            subprocess.Popen(
                [sys.executable, str(HERE / "rank_child.py"), json.dumps(spec)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    for child in children:
        _line(child, "ready")

    def go() -> dict[str, Any]:
        for child in children:
            _say(child)
        figures = [json.loads(_line(child)) for child in children]
        for child in children:
            _say(child)
        for child in children:
            child.wait(60)
        return {
            "rank_returned_s": max(each["returned_s"] for each in figures),
            "rank_touched_s": max(each["touched_s"] for each in figures),
            "rank_cpu_s": max(each["cpu_s"] for each in figures),
            "rank_anon_mib": max(each["anon_mib"] for each in figures),
            "rank_gib": max(each["gib"] for each in figures),
            "over_shard_mib": max(each["anon_mib"] - 1024 * each["gib"] for each in figures),
            "disk_gib_all": sum(each["disk_gib"] for each in figures),
            "read_gib_all": sum(each["read_gib"] for each in figures),
        }

    return go


def _say(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("go\n")
    child.stdin.flush()


def _line(child: subprocess.Popen[str], wanted: str = "") -> str:
    """What a rank says next; lines that libraries print are passed over."""
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith(wanted or "{"):
            return line
    raise RuntimeError(f"a rank ended with {child.wait()}")


def variants(folder: Path, tp: int) -> list[dict[str, Any]]:
    """Every variant, as keyword arguments of ``Variant``."""
    at = {"folder": os.fspath(folder), "tp": tp}

    def row(name: str, call: str, **args: Any) -> dict[str, Any]:
        return {"name": name, "call": "ranks:group", "args": {**at, "call": call, **args}}

    return [
        row("the vLLM way", "ranks:vllm_way"),
        row("loadkit", "ranks:loadkit_fused"),
        row("loadkit, alias never", "ranks:loadkit_fused", alias="never"),
        row("loadkit, broadcast", "ranks:loadkit_fused", distribute="broadcast", with_store=True),
    ]
