"""One measured run in this process: ``run_one.py '{"call": "module:function", "args": {}}'``."""

from __future__ import annotations

import importlib
import json
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if TYPE_CHECKING:
    import torch

PAGE = 4096
EVERY = 0.002  # seconds between samples of memory


def memory(*names: str) -> list[int]:
    """Lines of /proc/self/status in bytes."""
    wanted = {f"{name}:": at for at, name in enumerate(names)}
    found = [0] * len(names)
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, rest = line.partition("\t")
        if key in wanted:
            found[wanted[key]] = int(rest.split()[0]) << 10
    return found


def counters() -> dict[str, int]:
    """Counters of this process: bytes read, bytes from storage, page faults."""
    io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "rchar": int(io["rchar"]),
        "read_bytes": int(io["read_bytes"]),
        "minor": usage.ru_minflt,
        "major": usage.ru_majflt,
    }


class Peak(threading.Thread):
    """Samples memory until stopped; peaks in bytes above what there was at the start."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.stopped = threading.Event()
        self.start_anon, self.start_rss = memory("RssAnon", "VmRSS")
        self.anon = self.rss = 0

    def sample(self) -> None:
        anon, rss = memory("RssAnon", "VmRSS")
        self.anon = max(self.anon, anon - self.start_anon)
        self.rss = max(self.rss, rss - self.start_rss)

    def run(self) -> None:
        while not self.stopped.wait(EVERY):
            self.sample()

    def end(self) -> None:
        self.stopped.set()
        self.join()
        self.sample()


def tensors_of(result: Any) -> list[torch.Tensor]:
    """The tensors of what a variant returned: a module, a list of tensors, or something else."""
    if isinstance(result, list):
        return result
    return [p.detach() for p in result.parameters()] if hasattr(result, "parameters") else []


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements as one row of bytes."""
    import torch

    return tensor.reshape(-1).view(torch.uint8)


def touch(tensors: Iterable[torch.Tensor]) -> None:
    """Read one byte of every page."""
    for tensor in tensors:
        as_bytes(tensor)[::PAGE].max()


def checksum(tensors: Iterable[torch.Tensor]) -> str:
    """The sum of all bytes: the same for every way to fuse and order the same weights."""
    import torch

    total = 0
    for tensor in tensors:
        data = as_bytes(tensor)
        words = data[: data.numel() // 4 * 4].view(torch.int32)
        total += int(words.sum(dtype=torch.int64)) + int(data[words.numel() * 4 :].sum())
    return f"{total % 2**64:016x}"


def measure(go: Callable[[], Any]) -> dict[str, Any]:
    """Run ``go`` and give its figures; a dict it returns is taken into them."""
    before = counters()
    peak = Peak()
    peak.start()
    cpu, start = time.process_time(), time.perf_counter()
    result = go()
    returned = time.perf_counter() - start
    tensors = tensors_of(result)
    touch(tensors)
    touched = time.perf_counter() - start
    cpu = time.process_time() - cpu
    peak.end()
    after = counters()
    figures: dict[str, Any] = {
        "returned_s": returned,
        "touched_s": touched,
        "cpu_s": cpu,
        "anon_mib": peak.anon / 2**20,
        "rss_mib": peak.rss / 2**20,
        "read_gib": (after["rchar"] - before["rchar"]) / 2**30,
        "disk_gib": (after["read_bytes"] - before["read_bytes"]) / 2**30,
        "minor_faults": after["minor"] - before["minor"],
        "major_faults": after["major"] - before["major"],
    }
    if tensors:
        figures["gib"] = sum(t.nbytes for t in tensors) / 2**30
        figures["checksum"] = checksum(tensors)
    if isinstance(result, dict):
        figures |= result
    return figures


def main() -> None:
    spec = json.loads(sys.argv[1])
    module, _, name = spec["call"].partition(":")
    prepare = getattr(importlib.import_module(f"benchmarks.{module}"), name)
    figures = measure(prepare(**spec["args"]))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
