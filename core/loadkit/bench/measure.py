"""What one run took, measured from inside its process.

A run returns (the *returned* end); then one byte of every page of its tensors is read (the
*touched* end). Figures:

    returned_s, touched_s   seconds until each end
    cpu_s                   CPU seconds of all threads but the sampling one until the last end
    anon_mib                peak anonymous memory above the start (sampled every 2 ms)
    rss_mib                 peak resident memory above the start, file pages included
    read_gib, disk_gib      bytes given by read calls; bytes that came from storage
    minor_faults, major_faults
    gib, checksum           of all tensors' bytes, whatever their order: equal for equal weights

Counters that this system does not have are left out.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["Figures", "measure"]

Figures = dict[str, Any]

PAGE = 4096
EVERY = 0.002  # seconds between samples of memory
GIB, MIB = 2**30, 2**20


def measure(
    go: Callable[[], Any], *, touch_pages: bool = True, with_checksum: bool = True
) -> Figures:
    """Run ``go`` and give its figures; a dict that it returns is taken into them.

    Args:
        go: returns a module or a list of tensors, or figures of its own (a dict), or both of
            them as a pair.
        touch_pages: go on to the *touched* end.
        with_checksum: read all bytes once more, after everything was measured.
    """
    before = _counters()
    peak = _Peak()
    peak.start()
    cpu, start = time.process_time(), time.perf_counter()
    result = go()
    figures: Figures = {"returned_s": time.perf_counter() - start}
    result, own = result if isinstance(result, tuple) else (result, {})
    tensors = _tensors_of(result)
    if touch_pages:
        _touch(tensors)
        figures["touched_s"] = time.perf_counter() - start
    figures["cpu_s"] = time.process_time() - cpu - peak.cpu
    peak.end()
    figures |= {"anon_mib": peak.anon / MIB, "rss_mib": peak.rss / MIB}
    after = _counters()
    for name, key, unit in (("read_gib", "rchar", GIB), ("disk_gib", "read_bytes", GIB)):
        if key in after:
            figures[name] = (after[key] - before[key]) / unit
    figures |= {name: after[name] - before[name] for name in ("minor_faults", "major_faults")}
    if tensors:
        figures["gib"] = sum(t.nbytes for t in tensors) / GIB
        if with_checksum:
            figures["checksum"] = _checksum(tensors)
    figures |= own
    if isinstance(result, dict):
        figures |= result
    return figures


def _memory() -> tuple[int, int]:
    """Anonymous and resident bytes of this process; zeros where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0, 0
    found = dict(line.split(":", 1) for line in lines if ":" in line)
    anon, rss = (int(found.get(key, "0").split()[0]) << 10 for key in ("RssAnon", "VmRSS"))
    return anon, rss


def _counters() -> dict[str, int]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    found = {"minor_faults": usage.ru_minflt, "major_faults": usage.ru_majflt}
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return found
    io = dict(line.split(": ") for line in lines)
    return found | {key: int(io[key]) for key in ("rchar", "read_bytes")}


class _Peak(threading.Thread):
    """Samples memory until it is ended; peaks in bytes above what there was at the start."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="loadkit-bench")
        self._stopped = threading.Event()
        self._start_anon, self._start_rss = _memory()
        self.anon = self.rss = 0
        self.cpu = 0.0  # seconds that sampling took

    def sample(self) -> None:
        """Take the peaks up to now."""
        anon, rss = _memory()
        self.anon = max(self.anon, anon - self._start_anon)
        self.rss = max(self.rss, rss - self._start_rss)

    def run(self) -> None:
        """Sample until the end."""
        while not self._stopped.wait(EVERY):
            self.sample()
            self.cpu = time.thread_time()

    def end(self) -> None:
        """Stop sampling."""
        self._stopped.set()
        self.join()
        self.sample()


def _tensors_of(result: Any) -> list[torch.Tensor]:
    if isinstance(result, list):
        return result
    return [p.detach() for p in result.parameters()] if hasattr(result, "parameters") else []


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.reshape(-1).view(torch.uint8)


def _touch(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        if tensor.numel():
            _as_bytes(tensor)[::PAGE].max().item()  # of a device too: waits for it


def _checksum(tensors: Iterable[torch.Tensor]) -> str:
    """The sum of all bytes: the same for every way to fuse and order the same weights."""
    import torch

    total = 0
    for tensor in tensors:
        data = _as_bytes(tensor)
        words = data[: data.numel() // 4 * 4].view(torch.int32)
        total += int(words.sum(dtype=torch.int64)) + int(data[words.numel() * 4 :].sum())
    return f"{total % 2**64:016x}"
