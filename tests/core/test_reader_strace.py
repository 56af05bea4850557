"""The same faults, injected into the kernel's answers by strace: nothing of ours is replaced."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from helpers.extents import SIZE, content

pytestmark = pytest.mark.slow

CHILD = """
import json, sys
from helpers.extents import expected, held, mixed_extents
from loadkit.config import LoadConfig
from loadkit.errors import LoadkitError
from loadkit.readers import direct, eager, mmap, pread
from loadkit.sources.local_file import LocalFile

name, path = sys.argv[1:]
kinds = [pread.PreadReader, mmap.MmapReader, direct.DirectReader, eager.EagerReader]
file = LocalFile("weights.bin", path)
data = open(path, "rb").read()
reader = {kind.name: kind for kind in kinds}[name](LoadConfig())
extents = mixed_extents(file)
try:
    reader.read(extents)
    out = {"same": [held(e) == expected(data, e) for e in extents] == [True] * len(extents)}
except LoadkitError as error:
    out = error.to_dict() | {"errno": getattr(error, "errno", None)}
reader.close()
file.close()
print(json.dumps(out))
"""


@cache
def why_not() -> str:
    if shutil.which("strace") is None:
        return "there is no strace"
    done = subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True, text=True)
    return f"ptrace is refused: {done.stderr.strip()[:80]}" if done.returncode else ""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if why_not():
        pytest.skip(why_not())
    path = tmp_path_factory.mktemp("strace") / "weights.bin"
    path.write_bytes(content(SIZE))
    return path


def read_with(reader: str, weights: Path, inject: str) -> dict[str, Any]:
    """What the child read or raised while strace tampers with its reads of that file."""
    command = [
        *("strace", "-f", "-qq", "--seccomp-bpf", "-o", "/dev/null", "-P", str(weights)),
        *("-e", "trace=preadv,preadv2", "-e", f"inject=preadv,preadv2:{inject}"),
        *(sys.executable, "-c", CHILD, reader, str(weights)),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parents[1], timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


READERS = ["pread", "mmap", "direct", "eager"]


@pytest.mark.parametrize(("reader", "nth"), [*((each, 1) for each in READERS), ("pread", 3)])
def test_fault_1_eio_is_an_error_that_says_where(weights: Path, reader: str, nth: int) -> None:
    found = read_with(reader, weights, f"error=EIO:when={nth}")
    assert (found["code"], found["errno"], found["file"]) == ("E_IO", 5, "weights.bin")
    assert found["tensor"] and found["offset"] is not None and found["hint"]


@pytest.mark.parametrize("reader", READERS)
def test_fault_3_five_interruptions_are_invisible(weights: Path, reader: str) -> None:
    assert read_with(reader, weights, "error=EINTR:when=1..5") == {"same": True}


@pytest.mark.parametrize("reader", READERS)
def test_fault_5_nothing_early_is_a_truncated_file(weights: Path, reader: str) -> None:
    found = read_with(reader, weights, "retval=0:when=1")
    assert (found["code"], found["file"]) == ("E_TRUNCATED", "weights.bin")


@pytest.mark.parametrize("reader", READERS)
def test_fault_44_a_slow_disk_is_waited_for(weights: Path, reader: str) -> None:
    assert read_with(reader, weights, "delay_enter=2000") == {"same": True}
