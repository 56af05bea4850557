"""What the CLI's tests share: finished runs, and fakes of the line that plans and loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadkit.config import ParallelConfig

__all__ = ["FakeLine", "FakePlan", "Problem", "Ran", "Row", "spawn"]

BIDI = [chr(code) for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F)]
CONTROLS = [chr(code) for code in (*range(0x20), *range(0x7F, 0xA0)) if code != 0x0A]


@dataclass
class Ran:
    """One finished command."""

    code: int
    out: str
    err: str

    def json(self) -> dict[str, Any]:
        """stdout as its one JSON object."""
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found

    def assert_clean(self) -> None:
        """No control or direction character on either stream."""
        for text in (self.out, self.err):
            bad = sorted({hex(ord(c)) for c in text if c in CONTROLS or c in BIDI})
            assert not bad, bad


def spawn(*args: object, env: dict[str, str] | None = None, timeout: float = 60) -> Ran:
    """Run a command line the way a shell does."""
    done = subprocess.run(
        [sys.executable, "-m", "loadkit.cli", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **(env or {})},
    )
    return Ran(done.returncode, done.stdout, done.stderr)


@dataclass
class Row:
    """A plan's row."""

    tensor: str | None
    parameter: str | None
    kind: str = "copy"
    size: tuple[int, ...] = (4, 8)
    offset: int = 0
    file: str | None = "model.safetensors"

    def to_dict(self) -> dict[str, Any]:
        region = {"offset": self.offset, "size": list(self.size), "stride": _strides(self.size)}
        return {
            "tensor": self.tensor,
            "file": self.file,
            "source": {**region, "offset": 0},
            "parameter": self.parameter,
            "target": region,
            "exact": "exact",
            "kind": self.kind,
        }


@dataclass
class Problem:
    """A plan's problem."""

    code: str = "MISSING"
    message: str = "nothing fills it"
    tensor: str | None = None
    parameter: str | None = None
    file: str | None = None
    offset: int | None = None
    hint: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass
class FakePlan:
    """What ``loadkit.plan`` gives, as far as the CLI looks."""

    parallel: ParallelConfig
    rows: Sequence[Row] = ()
    problems: Sequence[Problem] = ()
    architecture: str = "LlamaForCausalLM"
    model_class: str = "loadkit_models.llama:LlamaForCausalLM"
    distribution: str = "loadkit-models"
    load_format: str = "safetensors"
    load_format_why: str = "model.safetensors is there"
    dtype: str = "float32"
    reader: str = "mmap"
    reader_why: str = "local files"
    notes: Sequence[Problem] = ()
    bytes_needed: int = 1000
    bytes_to_read: int = 1024
    parameter_bytes: int = 1000
    predicted_peak_bytes: int = 3 << 30
    requests: int = 7
    read_amplification: float = 1.024
    bytes_fetched: int = 0

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass
class FakeLine:
    """Stands for ``loadkit.loader``: records how it was called."""

    rows: Sequence[Row] = ()
    problems: Callable[[ParallelConfig], Sequence[Problem]] = lambda parallel: ()
    error: BaseException | None = None
    report: dict[str, Any] = field(default_factory=lambda: {"bytes_read": 1024, "seconds": {}})
    calls: list[dict[str, Any]] = field(default_factory=list)

    def plan(self, source: str, **keywords: Any) -> FakePlan:
        self.calls.append({"source": source, **keywords})
        if self.error is not None:
            raise self.error
        parallel = keywords["parallel"]
        return FakePlan(parallel, self.rows, self.problems(parallel))

    def load(self, source: str, **keywords: Any) -> Any:
        plan = self.plan(source, **keywords)
        report = types.SimpleNamespace(to_dict=lambda: dict(self.report))
        return types.SimpleNamespace(model=object(), report=report, plan=plan)


def _strides(size: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for length in reversed(size):
        strides.append(step)
        step *= length
    return strides[::-1]
