"""How much memory this process could still take: the machine's, and that of its control groups.

Source: the kernel's documentation of ``/proc/meminfo`` and of control groups, version 1 and 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["available_memory"]

# Of each version: its limits, what is used, and in memory.stat the page cache that can be dropped.
_V2 = (("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file"))
_V1 = (
    ("memory.limit_in_bytes", "memory.soft_limit_in_bytes"),
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that can be taken without swapping; None where the system does not tell.

    The least of what the machine has available and what each control group above this process
    still allows (its limit less what it uses, page cache that can be dropped not counted).

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    found = [free for folder, version in _groups(root) for free in _left_in(folder, version)]
    machine = _numbers(root / "proc/meminfo").get("MemAvailable:")
    if machine is not None:
        found.append(machine * 1024)
    return min(found, default=None)


def _groups(root: Path) -> Iterator[tuple[Path, tuple[tuple[str, ...], str, tuple[str, ...]]]]:
    """Folders of the memory control groups that hold this process, innermost first."""
    for line in _lines(root / "proc/self/cgroup"):
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers == "":
            top, version = root / "sys/fs/cgroup", _V2
        elif "memory" in controllers.split(","):
            top, version = root / "sys/fs/cgroup/memory", _V1
        else:
            continue
        # Inside a container the path may be the host's: then only the top is to be seen.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            folder = top.joinpath(*parts[:depth])
            if folder.is_dir():
                yield folder, version


def _left_in(folder: Path, version: tuple[tuple[str, ...], str, tuple[str, ...]]) -> Iterator[int]:
    """What a group's limits leave."""
    limits, usage, droppable = version
    used = _number(folder / usage)
    if used is None:
        return
    stat = _numbers(folder / "memory.stat")
    used -= sum(stat.get(key, 0) for key in droppable)
    for limit in limits:
        value = _number(folder / limit)
        if value is not None:
            yield max(0, value - max(0, used))


def _number(path: Path) -> int | None:
    """The one number of a file; None where there is none (``max``)."""
    text = next(_lines(path), "")
    return int(text) if text.isascii() and text.isdigit() else None


def _numbers(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    out = {}
    for line in _lines(path):
        fields = line.split()
        if len(fields) >= 2 and fields[1].isascii() and fields[1].isdigit():
            out[fields[0]] = int(fields[1])
    return out


def _lines(path: Path) -> Iterator[str]:
    try:
        yield from path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
