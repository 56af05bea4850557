"""A conversion that fails or is killed: the old folder or the new one, and resume finishes it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import loadkit
from helpers.checkpoints import write_llama
from helpers.converting import ENVIRON, MANIFEST, hidden, new_and_old, same_result, shim
from helpers.saving import Fault, contents
from loadkit.conversion import writing
from loadkit.conversion.journal import JOURNAL, read_journal
from loadkit.errors import (
    ChangedError,
    ConflictError,
    LoadkitError,
    NoWeightsError,
    ReadError,
    UsageError,
    WriteError,
)

SMALL: dict[str, Any] = {"max_shard_bytes": 30_000}


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few tensors at a time, so that a small model takes many steps."""
    monkeypatch.setattr(writing, "BUDGET", 20_000)


@pytest.fixture
def source(tmp_path: Path, small_steps: None) -> Path:
    """A checkpoint of 125 kB."""
    write_llama(tmp_path / "a", hidden=32, ffn=64, vocab=300, layers=3)
    return tmp_path / "a"


class Stop(ReadError):
    """What a test stops a conversion with: a bad read, after which going on makes sense."""


def stopping(monkeypatch: pytest.MonkeyPatch, at: int, error: BaseException | None = None) -> None:
    """Let the read number ``at`` (from 1) of a conversion fail."""
    real, calls = writing.read_slabs, 0

    def read_slabs(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise error or Stop("the cable", errno=errno.EIO)
        return real(*args)

    monkeypatch.setattr(writing, "read_slabs", read_slabs)


def begun(source: Path, target: Path, at: int = 4, **options: Any) -> Path:
    """Begin a conversion and stop it; returns the hidden folder it leaves."""
    with pytest.MonkeyPatch.context() as patch:
        stopping(patch, at)
        with pytest.raises(Stop):
            loadkit.convert(source, target, **{**SMALL, **options})
    (left,) = hidden(target.parent)
    return left


# -- faults of the disk --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "to", ["safetensors", pytest.param("sharded_state", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("call", "number"),
    [
        pytest.param("fsync", errno.EIO, id="14-fsync-EIO"),
        pytest.param("write", errno.EDQUOT, id="13-EDQUOT"),
        pytest.param("rename", errno.EIO, id="14-rename-EIO"),
        pytest.param("link", errno.ENOSPC, id="11-link-ENOSPC"),
    ],
)
def test_a_fault_at_any_call_leaves_the_old_folder(
    tmp_path: Path, small_steps: None, to: str, call: str, number: int
) -> None:
    source, before = new_and_old(tmp_path)
    (tmp_path / "out/notes.txt").write_text("mine")
    before["notes.txt"] = b"mine"
    faults = 0
    for at in (1, 2, 3, 5, 8, 13, 21, 34, 55, 89):
        error: LoadkitError | None = None
        with pytest.MonkeyPatch.context() as patch:
            fault = Fault(patch, call, number, at)
            try:
                loadkit.convert(source, tmp_path / "out", to=to, overwrite=True, **SMALL)
            except WriteError as caught:
                error = caught
        if not fault.hit:
            break
        faults += 1
        if error is None:  # the last link, of what came in the meantime
            assert call == "link"
            break
        assert (error.code, error.errno, error.exit_code) == ("E_IO", number, 3)
        assert contents(tmp_path / "out") == before, at
        assert hidden(tmp_path) == []
    assert faults or call == "rename"  # the folder is exchanged, not renamed
    assert loadkit.verify(tmp_path / "out").ok


def test_a_fault_where_nothing_was_leaves_nothing(tmp_path: Path, source: Path) -> None:
    for call in ("fsync", "write", "rename"):
        for at in (1, 4, 16):
            with pytest.MonkeyPatch.context() as patch:
                fault = Fault(patch, call, errno.ENOSPC, at)
                if call == "rename" and at > 1:
                    break
                with pytest.raises(WriteError):
                    loadkit.convert(source, tmp_path / "x/y/out", **SMALL)
            assert fault.hit
            assert not (tmp_path / "x").exists()


FULL = """
import errno, shutil, sys
from pathlib import Path
import loadkit
from helpers.saving import contents
from loadkit.errors import WriteError
source, disk = map(Path, sys.argv[1:])
usage = shutil.disk_usage(disk)._replace(free=1 << 40)
shutil.disk_usage = lambda _: usage  # somebody else fills the disk meanwhile
for out in (disk / "out", disk):
    loadkit.convert(source, out, dtype="bfloat16", overwrite=True)
    before = contents(out)
    (disk / "fill").write_bytes(bytes(3 << 20))
    before |= {name: data for name, data in contents(out).items() if name == "fill"}
    for to in ("safetensors", "sharded_state"):
        try:
            loadkit.convert(source, out, to=to, overwrite=True, max_shard_bytes=100_000)
        except WriteError as error:
            assert error.errno == errno.ENOSPC, error
        else:
            raise SystemExit("it fitted")
        assert contents(out) == before
        assert not list(disk.glob(".loadkit*"))
    (disk / "fill").unlink()
    assert loadkit.verify(out).ok
print("held")
"""


def test_11_a_full_disk_leaves_the_old_folder(tmp_path: Path) -> None:
    """A 4 MiB tmpfs: a folder in it, and its root, are converted to with what does not fit."""
    write_llama(tmp_path / "a", hidden=64, ffn=128, vocab=1000, layers=2)
    script, disk = tmp_path / "full.py", tmp_path / "disk"
    script.write_text(FULL)
    disk.mkdir()
    inside = f"{sys.executable} {script} {tmp_path / 'a'} {disk}"
    command = f"mount -t tmpfs -o size=4m none {disk} && {inside}"
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


def test_12_a_file_size_limit_leaves_the_old_folder(tmp_path: Path, small_steps: None) -> None:
    source, before = new_and_old(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, limits[1]))
        with pytest.raises(WriteError) as caught:
            loadkit.convert(source, tmp_path / "out", overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert caught.value.errno == errno.EFBIG
    assert caught.value.tensor is not None
    assert contents(tmp_path / "out") == before
    assert hidden(tmp_path) == []


SHIMMED = """
import sys
from loadkit.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("call", "number", "path"),
    [
        pytest.param(
            *("write", errno.EDQUOT, "model.safetensors"),
            id="13-write-EDQUOT",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("fsync", errno.EIO, "model.safetensors"), id="14-fsync-EIO", marks=pytest.mark.slow
        ),
        pytest.param(
            *("fsync", errno.EIO, ".loadkit-journal"),
            id="14-fsync-journal-EIO",
            marks=pytest.mark.slow,
        ),
        pytest.param("rename", errno.EIO, "/out", id="14-rename-EIO"),
    ],
)
def test_the_kernels_refusal_ends_the_command_with_3_and_the_old_folder(
    tmp_path: Path, call: str, number: int, path: str
) -> None:
    library = shim(tmp_path)
    source, before = new_and_old(tmp_path)
    done = subprocess.run(
        [
            *(sys.executable, "-c", SHIMMED, "convert", source, tmp_path / "out"),
            *("--overwrite", "--json"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env={
            **ENVIRON,
            "LD_PRELOAD": str(library),
            "FI_CALL": call,
            "FI_ERRNO": str(number),
            "FI_PATH": path,
            "FI_AT": "1",
        },
    )
    assert done.returncode == 3, done.stderr
    said = json.loads(done.stdout)
    assert (said["ok"], said["error"]["code"]) == (False, "E_IO")
    assert os.strerror(number) in said["error"]["message"]
    assert contents(tmp_path / "out") == before
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("name", ["exchanged", pytest.param("renamed", marks=pytest.mark.slow)])
def test_15_bytes_are_durable_before_their_name_is(tmp_path: Path, name: str) -> None:
    """The kernel's own log: write -> fsync(file) -> rename -> fsync(folder)."""
    source, _ = new_and_old(tmp_path)
    if shutil.which("strace") is None:
        pytest.skip("no strace")
    log = tmp_path / "log"
    calls = "trace=write,fsync,fdatasync,rename,renameat,renameat2,unlink,unlinkat"
    target = tmp_path / ("out" if name == "exchanged" else "fresh")
    done = subprocess.run(
        [
            *("strace", "-f", "-y", "-e", calls, "-o", log, sys.executable, "-m"),
            *("loadkit.cli", "convert", source, target, "--overwrite"),
            *("--to", "sharded_state", "--tp", "2"),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        env=ENVIRON,
    )
    if "ptrace" in done.stderr.lower() and "not permitted" in done.stderr.lower():
        pytest.skip(f"ptrace is refused: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    lines = log.read_text().splitlines()

    def at(*words: str) -> list[int]:
        return [i for i, line in enumerate(lines) if all(word in line for word in words)]

    shown = at("rename", f'{target}"')
    assert len(shown) == 1, name
    files = ["model-rank-0-part-0.safetensors", "model-rank-1-part-0.safetensors"]
    for file in [*files, "config.json", MANIFEST]:
        inside = f"/{file}>"
        writes, syncs = at(" write(", inside), at(" fsync(", inside)
        assert writes and syncs, (name, file)
        assert writes[-1] < syncs[-1] < shown[0], (name, file)
    # The manifest comes last, the hidden folder is durable before the step, its name after.
    assert at(" write(", f"/{MANIFEST}>")[0] > at(" fsync(", f"/{files[1]}>")[-1]
    folder = at(" fsync(", ".loadkit-convert-", ">)")
    assert any(i < shown[0] and "/model" not in lines[i] for i in folder), name
    assert [i for i in at(" fsync(", f"<{tmp_path}>") if i > shown[0]], name
    # Each line of the journal is durable before the next step.
    marks = at(" write(", f"/{JOURNAL}>")
    assert len(at(" fsync(", f"/{JOURNAL}>")) >= len(marks) >= 3, name


def test_27_a_file_system_without_locks_is_worked_on_without_them(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.MonkeyPatch.context() as patch:
        stopping(patch, 3)
        with pytest.raises(Stop):
            loadkit.convert(source, tmp_path / "out", **SMALL)
    assert hidden(tmp_path) == []  # nobody could tell whether somebody is still at it
    assert "no locks here" in caplog.text
    loadkit.convert(source, tmp_path / "out", **SMALL)
    assert loadkit.diff(source, tmp_path / "out").equal


def test_44_a_slow_disk_takes_longer_and_no_more(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            time.sleep(0.002)
            return real(*args, **kwargs)

        return call

    for name in ("write", "fsync", "preadv"):
        monkeypatch.setattr(os, name, slow(getattr(os, name)))
    loadkit.convert(source, tmp_path / "out", **SMALL)
    assert loadkit.verify(tmp_path / "out", against=source).ok


# -- going on ------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["safetensors", "sharded_state"])
@pytest.mark.parametrize("at", [1, 2, 5, 8])
def test_what_was_left_is_gone_on_with(tmp_path: Path, source: Path, to: str, at: int) -> None:
    loadkit.convert(source, tmp_path / "whole", to=to, **SMALL)
    left = begun(source, tmp_path / "out", at, to=to)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match="--resume") as caught:
        loadkit.convert(source, tmp_path / "out", to=to, **SMALL)
    assert caught.value.code == "UNFINISHED"
    assert str(left) in str(caught.value)
    report = loadkit.convert(source, tmp_path / "out", to=to, resume=True, **SMALL)
    assert report.bytes_kept + report.bytes_written == report.total_size
    assert (report.bytes_kept > 0) == (at > 1)
    assert same_result(contents(tmp_path / "out"), contents(tmp_path / "whole"))
    assert loadkit.verify(tmp_path / "out").ok
    assert hidden(tmp_path) == []


def test_an_interrupt_leaves_what_can_be_gone_on_with(
    tmp_path: Path, source: Path, caplog: Any
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stopping(patch, 4, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            loadkit.convert(source, tmp_path / "out", **SMALL)
    (left,) = hidden(tmp_path)
    assert f"kept in '{left}': --resume" in caplog.text
    report = loadkit.convert(source, tmp_path / "out", resume=True, **SMALL)
    assert report.bytes_kept > 0
    assert loadkit.diff(source, tmp_path / "out").equal


def test_resume_begins_where_nothing_was_left(tmp_path: Path, source: Path) -> None:
    assert loadkit.convert(source, tmp_path / "out", resume=True, **SMALL).bytes_kept == 0
    with pytest.raises(UsageError) as caught:
        loadkit.convert(source, tmp_path / "out", resume=True, **SMALL)
    assert caught.value.code == "EXISTS"


def touch(source: Path) -> dict[str, Any]:
    (source / "model.safetensors").touch()
    return {}


def rewrite(source: Path) -> dict[str, Any]:
    write_llama(source, hidden=32, ffn=64, vocab=300, layers=3, seed=7)
    return {}


@pytest.mark.parametrize(
    "change",
    [touch, rewrite, lambda _: {"dtype": "bfloat16"}, lambda _: {"max_shard_bytes": 50_000}],
    ids=["touched", "rewritten", "another-dtype", "another-size"],
)
def test_another_source_or_plan_is_not_gone_on_with(
    tmp_path: Path, source: Path, change: Callable[[Path], dict[str, Any]]
) -> None:
    left = begun(source, tmp_path / "out")
    before = contents(left)
    options = {**SMALL, **change(source)}
    with pytest.raises(ChangedError, match="another conversion"):
        loadkit.convert(source, tmp_path / "out", resume=True, **options)
    assert contents(left) == before
    report = loadkit.convert(source, tmp_path / "out", overwrite=True, **options)
    assert report.bytes_kept == 0
    assert loadkit.diff(source, tmp_path / "out", tolerance=2**-8).equal
    assert hidden(tmp_path) == []


def damage_data(left: Path) -> None:
    path = max(left.glob("*.safetensors"), key=lambda path: path.name)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def damage_first(left: Path) -> None:
    path = min(left.glob("*.safetensors"), key=lambda path: path.name)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def shorten(left: Path) -> None:
    path = max(left.glob("*.safetensors"), key=lambda path: path.name)
    os.truncate(path, path.stat().st_size - 100)


def lengthen(left: Path) -> None:
    path = max(left.glob("*.safetensors"), key=lambda path: path.name)
    path.write_bytes(path.read_bytes() + b"\0" * 1000)


def lose_file(left: Path) -> None:
    min(left.glob("*.safetensors")).unlink()


def tear(left: Path) -> None:
    journal = left / JOURNAL
    os.truncate(journal, journal.stat().st_size - 7)


def garble_line(left: Path) -> None:
    journal = left / JOURNAL
    lines = journal.read_bytes().split(b"\n")
    lines[2] = lines[2].replace(b'"end":', b'"end":9')
    journal.write_bytes(b"\n".join(lines))


def empty(left: Path) -> None:
    (left / JOURNAL).write_bytes(b"")


def no_journal(left: Path) -> None:
    (left / JOURNAL).unlink()


def add(left: Path) -> None:
    (left / "model-rank-9-part-0.safetensors").write_bytes(b"x")
    (left / "sub").mkdir()
    (left / "sub/x").write_text("x")


HARM = [damage_data, damage_first, shorten, lengthen, lose_file, tear, garble_line, empty]
HARM += [no_journal, add]


@pytest.mark.parametrize("harm", HARM, ids=lambda harm: harm.__name__)
def test_what_was_harmed_in_the_meantime_is_written_again(
    tmp_path: Path, source: Path, harm: Callable[[Path], None]
) -> None:
    loadkit.convert(source, tmp_path / "whole", **SMALL)
    harm(begun(source, tmp_path / "out", 6))
    loadkit.convert(source, tmp_path / "out", resume=True, **SMALL)
    assert same_result(contents(tmp_path / "out"), contents(tmp_path / "whole"))
    assert loadkit.verify(tmp_path / "out").ok


def test_a_journal_counts_up_to_its_first_bad_line(tmp_path: Path, source: Path) -> None:
    left = begun(source, tmp_path / "out", 6)
    whole = read_journal(left)
    assert whole.conversion
    assert whole.done
    text = (left / JOURNAL).read_bytes()
    for cut in range(0, len(text), 13):
        (left / JOURNAL).write_bytes(text[:cut])
        found = read_journal(left)
        assert found.size <= cut
        assert text[: found.size].endswith(b"\n") or not found.size
        assert found.done.items() <= whole.done.items()
    for bad in (b"", b"0123456789abcdef {}\n", b"\xff" * 100, b"[]\n" * 9):
        (left / JOURNAL).write_bytes(bad)
        assert not read_journal(left).conversion


def test_two_conversions_to_one_folder_do_not_meet(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = writing.read_slabs
    errors: list[BaseException] = []

    def read_slabs(*args: Any) -> Any:
        if not errors:
            errors.append(ConflictError("not yet"))
            for flags in ({}, {"resume": True}, {"overwrite": True}):
                with pytest.raises(ConflictError) as caught:
                    loadkit.convert(source, tmp_path / "out", **SMALL, **flags)
                errors.append(caught.value)
        return real(*args)

    monkeypatch.setattr(writing, "read_slabs", read_slabs)
    loadkit.convert(source, tmp_path / "out", **SMALL)
    assert {error.code for error in errors[1:]} == {"BUSY"}  # type: ignore[attr-defined]
    assert len(errors) == 4
    assert loadkit.diff(source, tmp_path / "out").equal


# -- kill ----------------------------------------------------------------------------------------

KILLED = """
import os, random, signal, sys, time
from pathlib import Path
import torch
import loadkit, loadkit.convert, loadkit.conversion.drafts
import loadkit_sharded_state.loader, loadkit_models.llama, loadkit_default.loader
from helpers.converting import same_result
from helpers.saving import contents
from loadkit.conversion import writing
source, out, how, to, tries = Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]
torch.set_num_threads(1)
writing.BUDGET = 20_000
old, new = contents(out), contents(out.parent / "new")
assert not same_result(old, new)
random.seed(11)
WAYS = "write", "fsync", "link", "rename", "unlink", "mkdir", "rmdir", "ftruncate"

def convert(out=out):
    loadkit.convert(source, out, to=to, tp=2 if to != "safetensors" else 1, resume=True,
                    overwrite=True, max_shard_bytes=30_000)

def die_at(number):
    calls = 0
    def dying(real):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        return call
    for name in WAYS:
        setattr(os, name, dying(getattr(os, name)))

begun = time.perf_counter()
pid = os.fork()
if not pid:
    convert(out.parent / "probe")
    os._exit(0)
os.waitpid(pid, 0)
takes = time.perf_counter() - begun
for number in range(int(tries)):
    pid = os.fork()
    if not pid:
        if how == "calls":
            die_at(1 + number * 5 % 37)
        convert()
        os._exit(0)
    if how == "moments":
        time.sleep(random.uniform(0.0, 1.2 * takes))
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    _, status = os.waitpid(pid, 0)
    found = contents(out)
    word = "new" if same_result(found, new) else "old" if found == old else "MIXED"
    print(word, os.WIFSIGNALED(status), flush=True)
    takes *= 0.9 if word == "new" else 1.1  # the machine has faster and slower moments
    if word == "new" and how == "calls":
        break
    if word == "new" and number < int(tries) - 1:  # the next one starts from the old again
        import shutil
        shutil.rmtree(out)
        for name, data in old.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_bytes(data)
convert_at_last = not same_result(contents(out), new)
if convert_at_last:
    convert()
print("end", same_result(contents(out), new), loadkit.verify(out).ok)
"""


def run_killed(tmp_path: Path, how: str, to: str, tries: int) -> list[list[str]]:
    """Runs of a conversion, each killed; what was at its target after each."""
    source, _ = new_and_old(tmp_path)
    ranks = 2 if to != "safetensors" else 1
    loadkit.convert(source, tmp_path / "new", to=to, tp=ranks, **SMALL)
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    done = subprocess.run(
        [sys.executable, str(script), source, tmp_path / "out", how, to, str(tries)],
        capture_output=True,
        text=True,
        env=ENVIRON,
        timeout=280,
    )
    assert not done.returncode, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows[-1] == ["end", "True", "True"]
    assert {word for word, *_ in rows[:-1]} <= {"old", "new"}
    return rows[:-1]


def check_left(folder: Path) -> None:
    """Nothing to resume is left, at most the old folder of a kill after the step; it goes next."""
    assert not [left for left in hidden(folder) if (left / JOURNAL).exists()]
    loadkit.convert(folder / "a", folder / "out", overwrite=True)
    assert hidden(folder) == []


@pytest.mark.parametrize(
    "to", ["safetensors", pytest.param("sharded_state", marks=pytest.mark.slow)]
)
def test_16_a_kill_at_a_call_leaves_the_old_or_the_new(tmp_path: Path, to: str) -> None:
    rows = run_killed(tmp_path, "calls", to, 9)
    assert sum(killed == "True" for _, killed in rows) > 3
    check_left(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["safetensors", "sharded_state"])
def test_16_a_kill_at_any_moment_leaves_the_old_or_the_new(tmp_path: Path, to: str) -> None:
    """50 tries, each gone on with by the next."""
    rows = run_killed(tmp_path, "moments", to, 50)
    assert len(rows) == 50
    assert sum(killed == "True" for _, killed in rows) > 20
    assert any(word == "new" for word, _ in rows)
    check_left(tmp_path)


def test_16_what_a_kill_leaves_is_never_taken_for_a_checkpoint(
    tmp_path: Path, source: Path
) -> None:
    left = begun(source, tmp_path / "out", 8, to="sharded_state", tp=2)
    assert list(left.glob("model-rank-0-part-*.safetensors"))
    with pytest.raises(LoadkitError):
        loadkit.load(tmp_path / "out")
    with pytest.raises(LoadkitError):
        loadkit.load(left, parallel=loadkit.ParallelConfig(tp_size=2))
    with pytest.raises((NoWeightsError, LoadkitError)):
        loadkit.load(tmp_path)
    assert not loadkit.verify(left).ok
