"""What a load did: ``LoadReport``, and how memory is measured."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self

from loadkit.parallel_config import ParallelConfig

if TYPE_CHECKING:
    from loadkit.device_layer import device_memory

__all__ = ["LoadReport", "PeakMeter", "Stopwatch", "amplification", "anonymous_bytes"]


def amplification(read: int, needed: int) -> float:
    """Bytes that are read for each that is needed; 1.0 where none is needed."""
    return round(read / needed, 4) if needed else 1.0


@dataclass
class LoadReport:
    """One rank's load. Times in seconds, sizes in bytes.

    Attributes:
        seconds: per step: resolve, build, plan, read, finish.
        bytes_needed: file bytes of the elements that the parameters are made of.
        bytes_read: what was taken from the files: those, gaps, and mapped extents; no headers.
        aliased_bytes: part of ``bytes_read`` that is mapped and not copied.
        requests: reads it took, after neighbours were joined; a view takes none.
        bytes_fetched: bytes of files that came over a network: headers, and what was tried again.
        bytes_sent: to other ranks, where they share what they read; ``bytes_received`` from them.
        parameter_bytes: what the parameters hold.
        peak: ``host_anonymous_bytes`` and ``device_bytes``, above the start of the load.
        reader: the reader's name; ``reader_why`` why it was chosen.
        casts: conversions: from, to, how many tensors.
        skipped: tensors that were not used, with reasons.
        initialised: parameters that no tensor wrote, with what they hold now and why.
        verified: what ``verify="digest"`` compared: ``compared_bytes``, ``recorded_bytes`` (no
            digest was known; it is kept for later loads) and, per file, who says what it should
            hold.
        warnings: what was allowed although it is unusual.
    """

    source: str
    architecture: str
    load_format: str
    reader: str
    reader_why: str
    parallel: ParallelConfig
    seconds: dict[str, float] = field(default_factory=dict)
    bytes_needed: int = 0
    bytes_read: int = 0
    aliased_bytes: int = 0
    requests: int = 0
    bytes_fetched: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    parameter_bytes: int = 0
    peak: dict[str, int] = field(default_factory=dict)
    casts: list[dict[str, Any]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    initialised: dict[str, str] = field(default_factory=dict)
    verified: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @property
    def read_amplification(self) -> float:
        """``bytes_read`` in parts of ``bytes_needed``: 1.0 if nothing else was read."""
        return amplification(self.bytes_read, self.bytes_needed)

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able values."""
        out = {each.name: getattr(self, each.name) for each in fields(self)}
        out["read_amplification"] = self.read_amplification
        out["parallel"] = self.parallel.to_dict()
        return out


class Stopwatch:
    """Seconds per named step, on a monotonic clock."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time the block."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def anonymous_bytes() -> int:
    """Memory of this process that no file backs; 0 where the system does not tell (macOS)."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:  # noqa: PTH123
            for line in status:
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return 0
    return 0


class PeakMeter:
    """Samples anonymous memory while a load runs; the peak is above what was there at the start."""

    def __init__(self, interval: float = 0.01, device: str = "cpu") -> None:
        self._interval = interval
        self._device = device
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True, name="loadkit-peak")
        self._start = self._peak = self._device_start = 0
        self._device_memory: device_memory | None = None

    def __enter__(self) -> Self:
        self._start = self._peak = anonymous_bytes()
        if self._device != "cpu":
            from loadkit.device_layer import device_memory

            self._device_memory = device_memory(self._device)
            self._device_memory.reset()
            self._device_start = self._device_memory.now()
        if self._start and os.name == "posix":
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._peak = max(self._peak, anonymous_bytes())

    def _sample(self) -> None:
        while not self._stop.wait(self._interval):
            self._peak = max(self._peak, anonymous_bytes())

    def peak(self) -> dict[str, int]:
        """``host_anonymous_bytes`` and ``device_bytes`` above the start."""
        device_bytes = 0
        if self._device_memory is not None:
            device_bytes = max(0, self._device_memory.peak() - self._device_start)
        return {
            "host_anonymous_bytes": max(0, self._peak - self._start),
            "device_bytes": device_bytes,
        }
