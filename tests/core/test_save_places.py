"""Where a save may go and over what, what it keeps, and what memory it takes."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import loadkit
from helpers.checkpoints import write_llama
from helpers.saving import HIDDEN, Fault, contents, model_of, number_in, old_folder, save_number
from loadkit import atomic_folder, folder_swap
from loadkit.atomic_folder import AtomicFolder
from loadkit.errors import WriteError
from loadkit.report import anonymous_bytes


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


def test_saving_over_the_files_that_the_parameters_are_views_of(tmp_path: Path, way: str) -> None:
    """Stated in ``loadkit.save``: no byte of an existing file is overwritten, so this is safe."""
    state = write_llama(tmp_path / "a", vocab=64)
    loadkit.save(loadkit.load_model(tmp_path / "a"), tmp_path / "out")
    result = loadkit.load(tmp_path / "out")
    assert result.report.aliased_bytes == sum(t.nbytes for t in state.values())
    model = result.model
    inode = (tmp_path / "out/model.safetensors").stat().st_ino
    expected = {name: param.clone() for name, param in model.named_parameters()}
    loadkit.save(model, tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").stat().st_ino != inode
    for name, param in model.named_parameters():
        assert torch.equal(param, expected[name])
    found = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    loadkit.save(model, tmp_path / "out")  # and again, from files that have lost their names


def test_a_source_cut_short_under_the_model_is_an_error_and_no_crash(tmp_path: Path) -> None:
    write_llama(tmp_path / "a", vocab=64, hidden=128)
    loadkit.save(loadkit.load_model(tmp_path / "a"), tmp_path / "src")
    model = loadkit.load_model(tmp_path / "src")
    os.truncate(tmp_path / "src/model.safetensors", 4096)
    with pytest.raises(WriteError) as caught:
        loadkit.save(model, tmp_path / "out")
    assert caught.value.errno == errno.EFAULT
    assert not (tmp_path / "out").exists()


def test_a_folder_that_the_process_stands_in_stays_the_same_folder(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inode = old.stat().st_ino
    monkeypatch.chdir(old / "notes")
    save_number(2.0, old)
    monkeypatch.chdir(old)
    assert Path().stat().st_ino == inode
    loadkit.save(model_of(3.0), ".", config={"number": 3.0})
    assert number_in(Path()) == 3.0
    assert not list(Path().glob(f"{HIDDEN}*"))


def test_a_folder_keeps_its_permissions_and_a_link_to_it_stays_one(old: Path) -> None:
    old.chmod(0o750)
    link = old.parent / "latest"
    link.symlink_to("out")
    save_number(2.0, link)
    assert link.is_symlink()
    assert number_in(old) == 2.0
    assert stat.S_IMODE(old.stat().st_mode) == 0o750
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((old / "config.json").stat().st_mode) == 0o666 & ~umask


def test_a_linked_file_of_a_hub_cache_is_replaced_and_its_blob_stays(tmp_path: Path) -> None:
    blob = tmp_path / "blobs/0123"
    blob.parent.mkdir()
    blob.write_bytes(b"precious")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot/model.safetensors").symlink_to("../blobs/0123")
    save_number(1.0, tmp_path / "snapshot")
    assert blob.read_bytes() == b"precious"
    assert number_in(tmp_path / "snapshot") == 1.0


def test_what_comes_in_while_a_folder_is_written_is_kept(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/first").write_text("1")
    real = folder_swap.exchange

    def late(first: Path, second: Path) -> None:
        (tmp_path / "out/second").write_text("2")
        real(first, second)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atomic_folder, "exchange", late)
        with AtomicFolder(tmp_path / "out", lambda name: False) as folder:
            with folder.create("third") as out:
                out.write(b"3")
    assert contents(tmp_path / "out") == {"first": b"1", "second": b"2", "third": b"3"}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_open_files_are_closed(old: Path) -> None:
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    save_number(2.0, old)
    before = count()
    save_number(3.0, old)
    with pytest.MonkeyPatch.context() as patch:
        Fault(patch, "write", errno.ENOSPC, 4)
        with pytest.raises(WriteError):
            save_number(4.0, old)
    assert count() == before


# -- memory --------------------------------------------------------------------------------------


@pytest.fixture
def peak() -> Callable[[], int]:
    """Bytes of memory of its own that the process has taken since, at the most."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        pytest.skip(f"the peak of memory cannot be reset here: {error}")
    start = anonymous_bytes()

    def measured() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        fields = {line.split(":")[0]: line.split()[1] for line in lines if line.endswith(" kB")}
        mapped = int(fields["RssFile"]) + int(fields["RssShmem"])
        return (int(fields["VmHWM"]) - mapped) * 1024 - start

    return measured


def test_a_save_takes_no_copy_of_the_model(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """200 MB in three kinds: one piece, a part of a fused one, and one that is transposed."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.whole = nn.Parameter(torch.ones(5000, 5000))
            self.turned = nn.Parameter(torch.ones(5000, 5000).t())

    model = Model()
    peak = request.getfixturevalue("peak")
    report = loadkit.save(model, tmp_path, max_shard_bytes=150_000_000)
    assert report.total_size == 200_000_000
    assert peak() < 64 << 20
    assert all((tmp_path / name).stat().st_size > 100_000_000 for name in report.files[:2])
