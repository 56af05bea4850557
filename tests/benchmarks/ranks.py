"""Ranks as real processes that load at the same time."""

from __future__ import annotations

import json
import os
import shutil
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


class Rank:
    """One rank's process."""

    def __init__(self, spec: dict[str, Any], notes: Path) -> None:
        self.notes = notes / f"rank-{spec['rank']}"  # what it says on stderr
        with self.notes.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "rank_child.py"), json.dumps(spec)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )

    def say(self) -> None:
        """Let it go on."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self.failure() from None

    def line(self, wanted: str) -> str:
        """The next line that begins so; what libraries print is passed over."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(wanted):
                return line
        raise self.failure()

    def failure(self) -> RuntimeError:
        """How it ended."""
        said = (self.notes.read_text().strip().splitlines() or ["no word"])[-1]
        return RuntimeError(f"{self.notes.name} ended with {self.process.wait(60)}: {said}")


def group(call: str, tp: int, with_store: bool = False, **args: Any) -> Go:
    """``tp`` ranks of ``call``, prepared before, started at the same moment.

    Figures: of the slowest and the largest rank, and bytes from storage of all ranks together.
    """
    notes = Path(tempfile.mkdtemp())
    store = str(notes / "store") if with_store else None
    spec = {"call": call, "args": {**args, "tp": tp}, "world": tp, "store": store}
    ranks = [Rank({**spec, "rank": rank}, notes) for rank in range(tp)]
    try:
        for rank in ranks:
            rank.line("ready")
    except BaseException:
        _end(ranks, notes)
        raise

    def go() -> dict[str, Any]:
        try:
            for rank in ranks:
                rank.say()
            figures = [json.loads(rank.line("{")) for rank in ranks]
            for rank in ranks:
                rank.say()
        finally:
            _end(ranks, notes)
        return {
            "rank_returned_s": max(each["returned_s"] for each in figures),
            "rank_touched_s": max(each["touched_s"] for each in figures),
            "rank_cpu_s": max(each["cpu_s"] for each in figures),
            "rank_anon_mib": max(each["anon_mib"] for each in figures),
            "rank_gib": max(each["gib"] for each in figures),
            "disk_gib_all": sum(each["disk_gib"] for each in figures),
            "read_gib_all": sum(each["read_gib"] for each in figures),
        }

    return go


def _end(ranks: list[Rank], notes: Path) -> None:
    for rank in ranks:
        try:
            rank.process.wait(5)
        except subprocess.TimeoutExpired:
            rank.process.kill()
            rank.process.wait()
    shutil.rmtree(notes, ignore_errors=True)


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
