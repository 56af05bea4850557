"""SIGKILL at any moment of a save: the folder holds the old model or the new one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.converting import ENVIRON
from helpers.saving import HIDDEN, number_in, old_folder, save_number

KILLED = """
import os, random, signal, sys, time
from pathlib import Path
import torch
import loadkit
from helpers.saving import model_of, number_in
out, tries = Path(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
random.seed(5)

def save(number):
    loadkit.save(model_of(number, 256), out, config={"architectures": ["X"], "number": number},
                 max_shard_bytes=300_000)

save(0.0)  # imports
begun = time.perf_counter()
save(0.0)
takes = time.perf_counter() - begun
before = 0.0
for number in range(1, tries + 1):
    pid = os.fork()
    if not pid:
        save(float(number))
        os._exit(0)
    time.sleep(random.uniform(0.0, 1.3 * takes))
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    _, status = os.waitpid(pid, 0)
    found = number_in(out)  # every tensor, the index and the config agree
    assert found in (before, float(number)), (found, before, number)
    print("new" if found == number else "old", os.WIFSIGNALED(status), flush=True)
    takes *= 0.9 if found == number else 1.1  # the machine has faster and slower moments
    before = found
"""


@pytest.mark.slow
def test_16_a_kill_at_any_moment_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    """50 tries, each over what the one before left."""
    out = old_folder(tmp_path / "out")
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    done = subprocess.run(
        [sys.executable, str(script), str(out), "50"],
        capture_output=True,
        text=True,
        env=ENVIRON,
        timeout=280,
    )
    assert not done.returncode, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert len(rows) == 50
    assert sum(killed == "True" for _, killed in rows) > 15
    assert {word for word, _ in rows} == {"old", "new"}
    for left in tmp_path.glob(f"{HIDDEN}*"):
        os.utime(left, (0, 0))
    save_number(3.0, out)
    assert number_in(out) == 3.0
    assert not list(tmp_path.glob(f"{HIDDEN}*"))
    assert (out / "notes/deep/mine.txt").read_text() == "keep me"
