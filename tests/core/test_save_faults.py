"""A save that fails, or is killed, leaves the old folder or the new one, and nothing else."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import loadkit
from helpers.saving import HIDDEN, Fault, contents, model_of, number_in, old_folder, save_number
from loadkit import atomic_folder, folder_swap
from loadkit.errors import LoadkitError, UsageError, WriteError


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A folder that was saved before, in shards, with somebody's notes in it."""
    return old_folder(tmp_path / "out")


@pytest.fixture(params=["swap", "renames"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways a folder is replaced: an exchange, and file by file where there is none."""
    if request.param == "renames":

        def refuse(first: Path, second: Path) -> None:
            raise OSError(errno.EINVAL, "no such call here")

        monkeypatch.setattr(atomic_folder, "exchange", refuse)
    way: str = request.param
    return way


@pytest.mark.parametrize(
    ("call", "number"),
    [
        pytest.param("fsync", errno.EIO, id="13-fsync-EIO"),
        pytest.param("write", errno.EDQUOT, id="13-EDQUOT"),
        pytest.param("rename", errno.EIO, id="13-rename-EIO"),
        pytest.param("replace", errno.EIO, id="13-replace-EIO"),
        pytest.param("link", errno.ENOSPC, id="11-link-ENOSPC"),
        pytest.param("close", errno.EIO, id="13-close-EIO"),
    ],
)
def test_a_fault_at_every_call_leaves_the_old_folder(
    old: Path, way: str, call: str, number: int, tmp_path: Path
) -> None:
    before = contents(old)
    faults = 0
    for at in range(1, 200):
        with pytest.MonkeyPatch.context() as patch:
            fault = Fault(patch, call, number, at)
            error: LoadkitError | None = None
            try:
                save_number(2.0, old, max_shard_bytes=30_000)
            except WriteError as caught:
                error = caught
        if not fault.hit:
            break
        faults += 1
        if error is None:  # a close after everything was done says nothing
            assert call == "close"
            break
        assert (error.code, error.errno, error.exit_code) == ("E_IO", number, 3)
        assert contents(old) == before, f"{call} {at}"
        assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert faults or (way, call) in {("swap", "rename"), ("swap", "replace"), ("renames", "rename")}
    assert number_in(old) == 2.0
    assert (old / "notes/deep/mine.txt").read_text() == "keep me"
    assert (old / "link").is_symlink()


def test_a_fault_where_nothing_was_leaves_nothing(tmp_path: Path) -> None:
    for call in ("fsync", "write", "rename"):
        for at in range(1, 50):
            with pytest.MonkeyPatch.context() as patch:
                fault = Fault(patch, call, errno.ENOSPC, at)
                try:
                    save_number(1.0, tmp_path / "a/b/out")
                except WriteError as error:
                    assert error.errno == errno.ENOSPC
            if not fault.hit:
                break
            assert list(tmp_path.iterdir()) == []
        assert number_in(tmp_path / "a/b/out") == 1.0
        shutil.rmtree(tmp_path / "a")


def test_an_error_names_the_tensor_and_the_offset(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        Fault(patch, "write", errno.ENOSPC, 4)  # config, header, two tensors
        with pytest.raises(WriteError, match="No space left") as caught:
            loadkit.save(model_of(1.0), tmp_path / "out", config={})
    error = caught.value
    assert (error.file, error.tensor) == ("model.safetensors", "0.bias")
    assert error.offset is not None
    assert error.offset % 8 == 0
    assert list(tmp_path.iterdir()) == []


FULL = """
import errno, sys
from pathlib import Path
import loadkit
from helpers.saving import *
from loadkit.errors import WriteError
for out in map(Path, sys.argv[1:]):
    save_number(1.0, out)
    before = contents(out)
    try:
        loadkit.save(model_of(2.0, 1024), out, config={"number": 2.0})
    except WriteError as error:
        assert error.errno == errno.ENOSPC, error
    else:
        raise SystemExit("it fitted")
    assert contents(out) == before
    assert not list(Path(sys.argv[1]).glob(".loadkit*"))
    save_number(3.0, out)
    assert number_in(out) == 3.0
print("held")
"""
ENVIRON = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}


def test_11_a_full_disk_leaves_the_old_folder(tmp_path: Path) -> None:
    """A 4 MiB tmpfs: its root, and a folder in it, are saved over by what does not fit."""
    script = tmp_path / "full.py"
    script.write_text(FULL)
    disk = tmp_path / "disk"
    disk.mkdir()
    command = f"mount -t tmpfs -o size=4m none {disk} && {sys.executable} {script} {disk} {disk}/in"
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", command],
        capture_output=True,
        text=True,
        timeout=120,
        env=ENVIRON,
    )
    if done.returncode and ("unshare" in done.stderr or "mount" in done.stderr):
        pytest.skip(f"no tmpfs of its own here: {done.stderr.strip()}")
    assert done.stdout == "held\n", done.stderr


def test_12_a_file_size_limit_leaves_the_old_folder(old: Path, way: str) -> None:
    before = contents(old)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        with pytest.raises(WriteError) as caught:
            save_number(2.0, old)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert caught.value.errno == errno.EFBIG
    assert contents(old) == before


def test_15_bytes_are_durable_before_their_name_is(
    old: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """write -> fsync(file) -> fsync(folder) -> rename -> fsync(folder)."""
    log: list[tuple[str, str]] = []

    def spy(name: str, what: Callable[..., str]) -> None:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            log.append((name, what(*args)))
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, call)

    def path_of(fd: int, *_: Any) -> str:
        return Path(f"/proc/self/fd/{fd}").readlink().name

    spy("write", path_of)
    spy("fsync", path_of)
    spy("replace", lambda _, target: Path(target).name)
    spy("rename", lambda _, target: Path(target).name)
    if way == "swap":
        real = folder_swap.exchange
        monkeypatch.setattr(
            atomic_folder, "exchange", lambda a, b: (log.append(("swap", b.name)), real(a, b))
        )
    save_number(2.0, old)
    for name in ("config.json", "model.safetensors"):
        last_write = max(i for i, entry in enumerate(log) if entry == ("write", name))
        synced = log.index(("fsync", name))
        calls = [("swap", "out")] if way == "swap" else [("replace", name), ("rename", name)]
        shown = next(i for i, entry in enumerate(log) if entry in calls)
        assert last_write < synced < shown
        folders = [i for i, (call, at) in enumerate(log) if call == "fsync" and at == "out"]
        if way == "swap":
            folders = [i for i, (c, at) in enumerate(log) if c == "fsync" and at == old.parent.name]
        assert max(folders) > shown
    if way == "renames":  # what makes it a checkpoint comes last
        names = [name for call, name in log if call in ("replace", "rename")]
        assert names.index("config.json") < names.index("model.safetensors")


def test_a_folder_in_the_way_of_a_file_is_an_error(old: Path, way: str) -> None:
    (old / "model.safetensors").mkdir()
    (old / "model.safetensors/inside").write_text("mine")
    before = contents(old)
    with pytest.raises(UsageError, match="is a folder"):
        save_number(2.0, old)
    assert contents(old) == before


def test_an_interrupt_leaves_the_old_folder(old: Path, tmp_path: Path) -> None:
    before = contents(old)

    class Interrupting(nn.Linear):
        def checkpoint_part(self, name: str, shard_id: Any) -> Any:
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls > 2:
                raise KeyboardInterrupt
            return getattr(self, name).detach() + 1

    with pytest.raises(KeyboardInterrupt):
        loadkit.save(Interrupting(4, 4), old, config={})
    assert contents(old) == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


# -- kill ----------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from helpers.saving import *
from loadkit import atomic_folder
from loadkit.errors import WriteError
out, at = Path(sys.argv[1]), int(sys.argv[2])
calls = 0
def dying(real):
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    return call
for name in ("write", "fsync", "link", "rename", "replace", "unlink", "mkdir", "rmdir"):
    setattr(os, name, dying(getattr(os, name)))
atomic_folder.exchange = dying(atomic_folder.exchange)
model = model_of(2.0)
for child in range(int(sys.argv[3])):
    pid = os.fork()
    if not pid:
        save_number(2.0, out, max_shard_bytes=30_000)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    print(at, number_in(out), os.WIFSIGNALED(status), flush=True)
    if not os.WIFSIGNALED(status):
        break
    at += 2
"""


def test_16_a_kill_at_any_call_leaves_the_old_or_the_new(old: Path, tmp_path: Path) -> None:
    """SIGKILL at the first system call, at the third, ... until a save comes through."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    done = subprocess.run(
        [sys.executable, str(script), str(old), "1", "150"],
        capture_output=True,
        text=True,
        env=ENVIRON,
        timeout=240,
    )
    assert not done.returncode, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    numbers = [float(number) for _, number, _ in rows]
    assert numbers == sorted(numbers), "old, old, ... new, new"
    assert {1.0, 2.0} == set(numbers)
    assert rows[-1][2] == "False"
    assert len(rows) > 20
    assert (old / "notes/deep/mine.txt").read_text() == "keep me"
    # What the killed ones left is removed by a save that comes later.
    left = list(tmp_path.glob(f"{HIDDEN}*"))
    assert left
    for folder in left:
        os.utime(folder, (0, 0))
    save_number(3.0, old)
    assert number_in(old) == 3.0
    assert not list(tmp_path.glob(f"{HIDDEN}*"))
