"""Local files: what may be opened, what a link may lead to, and what a read promises."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from helpers.checkpoints import sparse_safetensors, write_st
from loadkit import tables
from loadkit.config import LoadConfig
from loadkit.errors import (
    ChangedError,
    FormatError,
    LoadkitError,
    NotInstalledError,
    PathError,
    ReadError,
    TruncatedError,
)
from loadkit.safetensors_format import read_header
from loadkit.sources import open_source, scheme_of
from loadkit.sources.local import LocalSource


def descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


@pytest.fixture(autouse=True)
def no_descriptor_left() -> Iterator[None]:
    before = descriptors()
    yield
    assert descriptors() == before


def opened(folder: Path, name: str, **config: object) -> bytes:
    """Open a file of a folder and read all of it."""
    with LocalSource(folder, LoadConfig(**config)) as source:  # type: ignore[arg-type]
        file = source.open(name)
        return file.read(0, file.size)


def refused(folder: Path, name: str) -> PathError:
    began = time.monotonic()
    with pytest.raises(PathError) as caught:
        opened(folder, name)
    assert time.monotonic() - began < 1
    assert caught.value.code == "E_PATH" and caught.value.file == name
    return caught.value


# -- F rows: what a checkpoint's folder may hold -------------------------------------------------


def test_F19_a_link_out_of_the_folder_is_refused_and_names_its_target(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("/etc/passwd")
    error = refused(tmp_path, "model.safetensors")
    assert "/etc/passwd" in str(error) and "allowed_roots" in str(error)


def test_F19_a_linked_folder_is_no_way_out_either(tmp_path: Path) -> None:
    (tmp_path / "sub").symlink_to("/etc")
    refused(tmp_path, "sub/passwd")
    with LocalSource(tmp_path, LoadConfig()) as source:
        assert "sub/passwd" not in [info.name for info in source.list()]


def test_F20_the_hub_cache_blobs_are_where_snapshots_point(tmp_path: Path) -> None:
    repo = tmp_path / "hub" / "models--org--name"
    snapshot = repo / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "blobs" / "0a1b").write_bytes(b"weights")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0a1b")
    assert opened(snapshot, "model.safetensors") == b"weights"
    assert opened(snapshot / "model.safetensors", "model.safetensors") == b"weights"
    (snapshot / "out.safetensors").symlink_to("../../refs")
    (repo / "refs").write_text("x")
    refused(snapshot, "out.safetensors")
    (tmp_path / "linked").symlink_to(snapshot)
    assert opened(tmp_path / "linked", "model.safetensors") == b"weights"


def test_F20_blobs_beside_any_other_folder_are_not_allowed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "x").write_bytes(b"x")
    folder = tmp_path / "snapshots" / "rev"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").symlink_to("../../blobs/x")
    refused(folder, "model.safetensors")


def test_F21_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").symlink_to("b.safetensors")
    (tmp_path / "b.safetensors").symlink_to("a.safetensors")
    assert "loop" in str(refused(tmp_path, "a.safetensors"))
    with LocalSource(tmp_path, LoadConfig()) as source:
        assert [info.name for info in source.list()] == ["a.safetensors", "b.safetensors"]


def test_F21_a_root_that_is_a_loop_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(PathError, match="loop"):
        LocalSource(tmp_path / "loop", LoadConfig())


def test_F23_a_hard_link_is_fine(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "w").write_bytes(b"w")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.safetensors").hardlink_to(tmp_path / "elsewhere" / "w")
    assert opened(tmp_path / "folder", "model.safetensors") == b"w"


@pytest.mark.parametrize("target", ["/proc/self/mem", "/dev/zero"])
def test_F24_kernel_files_and_devices_are_refused(target: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(target)
    refused(tmp_path, "model.safetensors")
    with pytest.raises(PathError):  # also where the caller allows the place ...
        opened(tmp_path, "model.safetensors", allowed_roots=("/",))
    with pytest.raises(PathError):  # ... or names the file itself
        LocalSource(target, LoadConfig())


def test_F25_a_fifo_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    assert "FIFO" in str(refused(tmp_path, "model.safetensors"))
    with LocalSource(tmp_path, LoadConfig()) as source:
        assert [info.name for info in source.list()] == ["model.safetensors"]


def test_F27_a_folder_named_like_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    assert "folder" in str(refused(tmp_path, "model.safetensors"))
    with LocalSource(tmp_path, LoadConfig()) as source:
        assert [info.name for info in source.list()] == ["model.safetensors"]


def test_F28_a_device_and_a_socket_are_refused(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s.safetensors"))
        assert "socket" in str(refused(tmp_path, "s.safetensors"))
    try:
        os.mknod(tmp_path / "d.safetensors", 0o600 | 0o020000, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("devices may not be made here")
    assert "device" in str(refused(tmp_path, "d.safetensors"))


def test_F29_a_huge_sparse_file_is_refused_by_its_header_alone(tmp_path: Path) -> None:
    path = sparse_safetensors(tmp_path / "model.safetensors", {"w": ("F32", (4,))})
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    began = time.monotonic()
    with LocalSource(tmp_path, LoadConfig()) as source:
        with pytest.raises(FormatError) as caught:
            read_header(source.open("model.safetensors"))
    assert caught.value.code == "E_LAYOUT" and caught.value.tensor == "w"
    assert time.monotonic() - began < 1
    assert path.stat().st_blocks * 512 < 1 << 20


def test_a_link_inside_the_folder_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"w")
    (tmp_path / "model.safetensors").symlink_to("real")
    assert opened(tmp_path, "model.safetensors") == b"w"


def test_a_link_to_nothing_says_that_the_download_is_incomplete(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("gone")
    assert "incomplete" in str(refused(tmp_path, "model.safetensors"))


def test_allowed_roots_allow_links_to_other_places(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "w").write_bytes(b"w")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.safetensors").symlink_to(tmp_path / "store" / "w")
    refused(tmp_path / "folder", "model.safetensors")
    (tmp_path / "alias").symlink_to("store")
    for root in ("store", "alias"):
        roots = (str(tmp_path / root),)
        assert opened(tmp_path / "folder", "model.safetensors", allowed_roots=roots) == b"w"


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/../../x", "/etc/passwd", "a//b", "a\\b", "C:x", "a\0b", "a" * 5000],
)
def test_names_that_are_no_names_are_refused(name: str, tmp_path: Path) -> None:
    refused(tmp_path, name)


# -- sources: what the user wrote ----------------------------------------------------------------


def test_a_single_file_is_a_source_with_its_side_files(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf", "config.json", "notes.txt"):
        (tmp_path / name).write_text(name)
    with LocalSource(tmp_path / "a.gguf", LoadConfig()) as source:
        assert [(info.name, info.size) for info in source.list()] == [
            ("a.gguf", 6), ("config.json", 11),
        ]  # fmt: skip
        assert source.open("config.json").read(0, 6) == b"config"


def test_a_single_file_that_the_user_named_may_be_a_link_to_anywhere(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "blob").write_bytes(b"w")
    (tmp_path / "folder").mkdir()
    link = tmp_path / "folder" / "m.gguf"
    link.symlink_to(tmp_path / "store" / "blob")
    assert opened(link, "m.gguf") == b"w"


def test_the_listing_is_sorted_goes_two_folders_deep_and_skips_dot_folders(tmp_path: Path) -> None:
    for name in ("b/c/d/too-deep", "b/c/z", "b/y", "x", ".git/config", ".hidden"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    with LocalSource(tmp_path, LoadConfig()) as source:
        assert [info.name for info in source.list()] == [".hidden", "b/c/z", "b/y", "x"]
        assert source.list()[3].size == 1


def test_UX_02_home_relative_and_file_uris_are_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my model").mkdir()
    (tmp_path / "my model" / "w").write_bytes(b"w")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for text in ("~/my model", "my model", "./my model", f"file://{tmp_path}/my%20model"):
        with open_source(text, LoadConfig()) as source:
            assert [info.name for info in source.list()] == ["w"]
    with pytest.raises(PathError, match="another machine"):
        open_source("file://server/share", LoadConfig())


@pytest.mark.parametrize(
    "text", ["/no/such/model", "./no-such", "~/no/such/model", "../no/such.gguf", "C:\\models\\x",
             "no-such-model", "org/name/deeper", "there/nothing"]
)  # fmt: skip
def test_UX_02_a_path_that_does_not_exist_says_so(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    with pytest.raises(PathError, match="no such file or directory") as caught:
        open_source(text, LoadConfig())
    assert caught.value.code == "E_PATH"


def test_UX_02_a_typo_names_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "SmolLM2-135M").mkdir()
    with pytest.raises(PathError, match="SmolLM2-135M'"):
        open_source(tmp_path / "SmolLM-135M", LoadConfig())


def test_UX_02_a_repository_id_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tables.sources, "names", lambda: ["file"])
    with pytest.raises(NotInstalledError, match=r'pip install "loadkit\[hub\]"'):
        open_source("org/name", LoadConfig())
    assert scheme_of("org/name") == "hf"
    (tmp_path / "org").mkdir()
    assert scheme_of("org/name") == "file"  # the parent is there, so a path was meant


def test_UX_02_an_unknown_scheme_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(LoadkitError) as caught:
        open_source("nosuch://bucket/model", LoadConfig())
    assert "nosuch" in str(caught.value) and "file" in str(caught.value)


# -- files ---------------------------------------------------------------------------------------


def test_a_file_is_opened_once_and_closed_with_its_source(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(b"0123456789")
    with LocalSource(tmp_path, LoadConfig()) as source:
        file = source.open("w")
        assert source.open("w") is file
        assert (file.size, file.path, file.name) == (10, str(tmp_path.resolve() / "w"), "w")
        assert file.read(2, 3) == b"234" and file.read(10, 0) == b""
    file.close()
    with pytest.raises(ReadError, match="closed"):
        file.read(0, 1)


def test_a_read_past_the_end_allocates_nothing(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(b"0123456789")
    with LocalSource(tmp_path, LoadConfig()) as source:
        for offset, nbytes in ((8, 3), (0, 1 << 60), (1 << 60, 1)):
            with pytest.raises(TruncatedError) as caught:
                source.open("w").read(offset, nbytes)
            assert (caught.value.file, caught.value.offset) == ("w", offset)


def test_short_reads_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(1000)
    (tmp_path / "w").write_bytes(data)
    pread, preadv = os.pread, os.preadv
    monkeypatch.setattr(os, "pread", lambda fd, n, at: pread(fd, min(n, 7), at))
    monkeypatch.setattr(os, "preadv", lambda fd, to, at: preadv(fd, [to[0][:7]], at))
    assert opened(tmp_path, "w") == data


def test_a_file_cut_after_opening_is_truncated_never_garbage(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(b"x" * 1000)
    with LocalSource(tmp_path, LoadConfig()) as source:
        file = source.open("w")
        os.truncate(tmp_path / "w", 100)
        with pytest.raises(TruncatedError):
            file.read(0, 1000)
        with pytest.raises(ChangedError):
            file.check_unchanged()


def test_a_failing_read_carries_errno_file_and_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "w").write_bytes(b"x" * 10)

    def fail(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with LocalSource(tmp_path, LoadConfig()) as source:
        file = source.open("w")
        monkeypatch.setattr(os, "pread", fail)
        with pytest.raises(ReadError) as caught:
            file.read(4, 2)
    error = caught.value
    assert (error.code, error.errno, error.file, error.offset) == ("E_IO", errno.EIO, "w", 4)


@pytest.mark.parametrize("change", ["write", "grow", "replace", "remove"])
def test_a_file_that_changes_is_noticed(change: str, tmp_path: Path) -> None:
    path = tmp_path / "w"
    path.write_bytes(b"x" * 100)
    os.utime(path, ns=(10**9, 10**9))
    with LocalSource(tmp_path, LoadConfig()) as source:
        file = source.open("w")
        file.check_unchanged()
        match change:
            case "write":
                with path.open("r+b") as same:
                    same.write(b"y")
            case "grow":
                with path.open("ab") as same:
                    same.write(b"y")
            case "replace":
                (tmp_path / "new").write_bytes(b"x" * 100)
                os.utime(tmp_path / "new", ns=(10**9, 10**9))
                (tmp_path / "new").replace(path)
            case "remove":
                path.unlink()
        with pytest.raises(ChangedError) as caught:
            file.check_unchanged()
        assert caught.value.code == "E_CHANGED" and caught.value.file == "w"


def test_a_subfolder_is_the_root(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write_st(tmp_path / "sub" / "model.safetensors", {"w": torch.zeros(1)})
    with open_source(tmp_path, LoadConfig(subfolder="sub")) as source:
        assert [info.name for info in source.list()] == ["model.safetensors"]


def test_importing_sources_does_not_import_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys, loadkit.sources.local, loadkit.safetensors_format\n"
        "print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
