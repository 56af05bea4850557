"""Available memory: the machine's, and what each control group above the process leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadkit.available_memory import available_memory

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MACHINE = {"proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable:   33554432 kB\n"}


def v2(group: str, limit: str, used: int, cache: int = 0, high: str = "max") -> dict[str, str]:
    folder = f"sys/fs/cgroup{group}"
    return {
        f"{folder}/memory.max": limit + "\n",
        f"{folder}/memory.high": high + "\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": f"anon 5\nactive_file {cache}\ninactive_file {cache}\n",
    }


def test_a_machine_without_control_groups_has_what_it_says(tmp_path: Path) -> None:
    assert available_memory(write(tmp_path, MACHINE)) == 32 * GIB


def test_a_system_that_tells_nothing_is_unknown(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None


@pytest.mark.parametrize(
    ("groups", "left"),
    [
        pytest.param(v2("/pod/box", str(8 * GIB), 6 * GIB), 2 * GIB, id="max"),
        pytest.param(v2("/pod/box", str(8 * GIB), 6 * GIB, GIB), 4 * GIB, id="cache can go"),
        pytest.param(v2("/pod/box", "max", 6 * GIB, high=str(7 * GIB)), GIB, id="high"),
        pytest.param(v2("/pod/box", str(GIB), 6 * GIB), 0, id="over its limit"),
        pytest.param(v2("/pod/box", "max", 6 * GIB), 32 * GIB, id="no limit"),
        pytest.param(
            v2("/pod/box", str(9 * GIB), GIB) | v2("/pod", str(8 * GIB), 5 * GIB),
            3 * GIB,
            id="the outer one is tighter",
        ),
        pytest.param(v2("", str(8 * GIB), 5 * GIB), 3 * GIB, id="a container sees the top only"),
    ],
)
def test_version_2_groups(tmp_path: Path, groups: dict[str, str], left: int) -> None:
    write(tmp_path, MACHINE | groups | {"proc/self/cgroup": "0::/pod/box\n"})
    assert available_memory(tmp_path) == left


@pytest.mark.parametrize("folder", ["/docker/abc", ""], ids=["own", "top"])
def test_version_1_groups(tmp_path: Path, folder: str) -> None:
    top = f"sys/fs/cgroup/memory{folder}"
    write(
        tmp_path,
        MACHINE
        | {
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n",
            f"{top}/memory.limit_in_bytes": f"{4 * GIB}\n",
            f"{top}/memory.soft_limit_in_bytes": "9223372036854771712\n",
            f"{top}/memory.usage_in_bytes": f"{3 * GIB}\n",
            f"{top}/memory.stat": f"cache 1\ntotal_inactive_file {GIB}\ntotal_active_file 0\n",
        },
    )
    assert available_memory(tmp_path) == 2 * GIB


def test_this_machine_has_some() -> None:
    found = available_memory()
    assert found is None or 0 <= found < 1 << 50
