"""The hub's cache: when it is enough, who writes to it, and what it may lead to."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import loadkit
from helpers.checkpoints import llama_sd, write_cfg, write_index, write_llama, write_shards
from helpers.hub_server import Hub, ask_hub, hub_server
from loadkit.config import LoadConfig
from loadkit.errors import DownloadError, IntegrityError, PathError, WriteError
from loadkit.sources import open_source

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    write_llama(tmp_path / "toy", shards=2)
    with hub_server(org__toy=tmp_path / "toy") as server:
        ask_hub(server, tmp_path / "home", monkeypatch)
        yield server


def repo_of(tmp_path: Path) -> Path:
    return tmp_path / "home" / "hub" / "models--org--toy"


def snapshot(hub: Hub, tmp_path: Path) -> Path:
    return repo_of(tmp_path) / "snapshots" / hub.commit("org/toy")


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def down(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody answers where the hub should be."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")


# -- offline -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["offline", "down"])
def test_DSC_08_fault_21_a_whole_snapshot_loads_without_the_hub(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    expected = loadkit.load_model("org/toy").state_dict()
    hub.requests.clear()
    (offline if how == "offline" else lambda m: down(hub, m))(monkeypatch)
    result = loadkit.load("org/toy", load_config=LoadConfig(verify="digest"))
    assert all(torch.equal(expected[k], v) for k, v in result.model.state_dict().items())
    assert hub.requests == [] and result.report.bytes_fetched == 0


@pytest.mark.parametrize("how", ["offline", "down"])
@pytest.mark.parametrize("lost", ["link", "blob", "cut"])
def test_DSC_08_fault_21_a_partial_snapshot_lists_what_is_missing(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, lost: str
) -> None:
    loadkit.load("org/toy")
    for name in SHARDS:
        path = snapshot(hub, tmp_path) / name
        if lost == "link":
            path.unlink()
        elif lost == "blob":
            path.resolve().unlink()
            assert path.is_symlink() and not path.exists()
        else:
            os.truncate(path, 100)
    (offline if how == "offline" else lambda m: down(hub, m))(monkeypatch)
    with pytest.raises(DownloadError) as caught:
        loadkit.load("org/toy")
    assert caught.value.code == "E_OFFLINE" and caught.value.exit_code == 3
    assert caught.value.detail["missing"] == SHARDS
    assert all(name in str(caught.value) for name in SHARDS)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    loadkit.load("org/toy")  # fetched again


def hand_made(home: Path, sha: str = "abc1230000000000000000000000000000000000") -> Path:
    """A cache without a listing, as older tools leave it: the second shard's blob is missing."""
    repo = home / "hub" / "models--org--toy"
    folder = repo / "snapshots" / sha
    folder.mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(sha)
    write_cfg(folder)
    state = llama_sd()
    index = write_shards(folder, state, 2)
    write_index(folder, index)
    for number, name in enumerate(sorted(set(index.values()))):
        (folder / name).rename(repo / "blobs" / f"b{number}")
        (folder / name).symlink_to(f"../../blobs/b{number}")
    return folder


def test_DSC_08_a_cache_without_a_listing_is_held_against_its_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    folder = hand_made(tmp_path / "home")
    offline(monkeypatch)
    whole = loadkit.load_model("org/toy").state_dict()
    expected = loadkit.load_model(folder).state_dict()
    assert all(torch.equal(whole[k], v) for k, v in expected.items())
    second = sorted(p.name for p in folder.glob("*.safetensors"))[1]
    (folder / second).resolve().unlink()
    with pytest.raises(DownloadError) as caught:
        loadkit.load("org/toy")
    assert caught.value.code == "E_OFFLINE" and caught.value.detail["missing"] == [second]
    (folder / second).unlink()
    with pytest.raises(DownloadError) as caught:
        loadkit.load("org/toy")
    assert caught.value.detail["missing"] == [second]


def test_nothing_in_the_cache_is_said(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offline(monkeypatch)
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE") as caught:
        loadkit.plan("org/toy")
    assert caught.value.code == "E_OFFLINE" and "is not in the cache" in str(caught.value)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    down(hub, monkeypatch)
    with pytest.raises(DownloadError, match="cannot be reached") as caught:
        loadkit.plan("org/toy")
    assert caught.value.code == "E_OFFLINE"


def test_a_cache_that_huggingface_hub_filled_is_used_and_the_other_way_round(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    commit, cache = hub.commit("org/toy"), tmp_path / "home" / "hub"
    for name in hub.files("org/toy"):
        hf_hub_download("org/toy", name, cache_dir=cache, endpoint=hub.url)
    offline(monkeypatch)
    loadkit.load("org/toy")
    shutil.rmtree(cache)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    loadkit.load("org/toy")
    for name in hub.files("org/toy"):
        found = try_to_load_from_cache("org/toy", name, cache_dir=cache, revision=commit)
        assert isinstance(found, str) and Path(found).is_file()
        main = try_to_load_from_cache("org/toy", name, cache_dir=cache)
        assert main == found


# -- damage --------------------------------------------------------------------------------------


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


def test_a_flipped_byte_in_the_cache_is_noticed_by_the_hubs_digest(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loadkit.load("org/toy")
    flip(snapshot(hub, tmp_path) / SHARDS[1], -3)
    offline(monkeypatch)
    with pytest.raises(IntegrityError) as caught:
        loadkit.load("org/toy", load_config=LoadConfig(verify="digest"))
    assert caught.value.code == "E_DIGEST" and caught.value.file == SHARDS[1]


@pytest.mark.parametrize(
    ("case", "fits"),
    [
        pytest.param("outside", False, id="F19"),
        pytest.param("blobs", True, id="F20"),
        pytest.param("loop", False, id="F21"),
    ],
)
def test_a_link_of_the_cache_leads_to_its_blobs_or_nowhere(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, fits: bool
) -> None:
    loadkit.load("org/toy")
    path = snapshot(hub, tmp_path) / SHARDS[0]
    real = path.resolve()
    if case == "outside":
        outside = tmp_path / "outside.safetensors"
        shutil.copy(real, outside)
        path.unlink()
        path.symlink_to(outside)
    elif case == "loop":
        path.unlink()
        path.symlink_to(SHARDS[0])
    offline(monkeypatch)
    if fits:
        loadkit.load("org/toy")
        return
    with pytest.raises((PathError, DownloadError)) as caught:
        loadkit.load("org/toy")
    assert caught.value.code in ("E_PATH", "E_OFFLINE")


@pytest.mark.parametrize("text", ["{", "[]", '{"format_version": 9}', '{"format_version":1}'])
def test_a_damaged_listing_in_the_cache_is_asked_for_again(
    hub: Hub, tmp_path: Path, text: str
) -> None:
    loadkit.load("org/toy")
    (tree,) = (repo_of(tmp_path) / "trees").iterdir()
    tree.write_text(text)
    hub.requests.clear()
    loadkit.load("org/toy")
    assert hub.count(path="/tree/") == 1


# -- several processes ---------------------------------------------------------------------------

WORKER = """
import logging, sys
logging.basicConfig(level=logging.INFO)
from loadkit.config import LoadConfig
from loadkit_hub.source import HubSource
with HubSource("org/toy", LoadConfig(stream=False)) as source:
    names = [i.name for i in source.list() if i.name.endswith(".safetensors")]
    source.make_local(names)
    import hashlib
    for name in names:
        file = source.open(name)
        assert file.local
        print(name, hashlib.sha256(file.read(0, file.size)).hexdigest())
"""


def spawned(count: int) -> list[tuple[str, str]]:
    """What each of some processes said, to both."""
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(count)
    ]
    done = [worker.communicate(timeout=120) for worker in workers]
    assert all(worker.returncode == 0 for worker in workers), [err for _, err in done]
    return done


def test_DSC_09_fault_25_processes_that_start_together_fetch_each_file_once(
    hub: Hub, tmp_path: Path
) -> None:
    def slow(request: object, name: str) -> None:
        if name.endswith(".safetensors"):
            time.sleep(0.3)

    hub.answer = slow
    said = spawned(8)
    digests = [
        f"{name} {hashlib.sha256((tmp_path / 'toy' / name).read_bytes()).hexdigest()}"
        for name in SHARDS
    ]
    assert all(out.split("\n")[:-1] == digests for out, _ in said)
    waited = ["waiting for another process, which holds" in log for _, log in said]
    assert sum(waited) >= 4  # those that began while the first was at it
    fetched = {name: count for name, count in hub.fetched().items() if name in SHARDS}
    assert fetched == dict.fromkeys(SHARDS, 1)
    assert not [p for p in repo_of(tmp_path).rglob("*") if "incomplete" in p.name]


# -- locks and caches that cannot be written -----------------------------------------------------


def test_DSC_10_a_whole_snapshot_loads_without_writing_or_locking_anything(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loadkit.load("org/toy")
    shutil.rmtree(tmp_path / "home" / "hub" / ".locks")
    before = {path: path.lstat().st_mtime_ns for path in (tmp_path / "home").rglob("*")}

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    loadkit.load("org/toy")
    offline(monkeypatch)
    loadkit.load("org/toy")
    after = {path: path.lstat().st_mtime_ns for path in (tmp_path / "home").rglob("*")}
    assert after == before


def test_DSC_10_fault_27_a_file_system_without_locks_is_written_to_all_the_same(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    loadkit.load("org/toy")
    assert "No locks available" in caplog.text and ".lock" in caplog.text
    assert not [p for p in repo_of(tmp_path).rglob("*") if "incomplete" in p.name]


def test_DSC_10_fault_27_a_cache_that_cannot_be_written_says_what_to_do(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").write_text("no folder")
    with pytest.raises(WriteError, match="stream=true") as caught:
        loadkit.load("org/toy")
    assert caught.value.code == "E_IO" and caught.value.errno
    loadkit.load("org/toy", load_config=LoadConfig(stream=True))
    assert loadkit.plan("org/toy").ok


def test_DSC_10_a_lock_file_that_nobody_holds_does_not_count(hub: Hub, tmp_path: Path) -> None:
    locks = tmp_path / "home" / "hub" / ".locks" / "models--org--toy"
    locks.mkdir(parents=True)
    for name in hub.files("org/toy"):
        oid = hub.oid(tmp_path / "toy" / name)
        (locks / f"{oid}.lock").touch()
    loadkit.load("org/toy")


def test_DSC_10_waiting_for_a_held_lock_is_told_and_ends(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    locks = tmp_path / "home" / "hub" / ".locks" / "models--org--toy"
    locks.mkdir(parents=True)
    path = locks / f"{hub.oid(tmp_path / 'toy' / SHARDS[0])}.lock"
    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(DownloadError) as caught:
            loadkit.load("org/toy", load_config=LoadConfig(network_deadline=0.3))
        assert caught.value.code == "E_TIMEOUT" and str(path) in str(caught.value)
        assert str(path) in caplog.text
        release = threading.Timer(0.3, fcntl.flock, (held, fcntl.LOCK_UN))
        release.start()
        loadkit.load("org/toy")
        release.join()


def test_what_is_fetched_can_be_read_by_whom_the_umask_lets(hub: Hub, tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        loadkit.load("org/toy")
    finally:
        os.umask(old)
    mode = stat.S_IMODE((snapshot(hub, tmp_path) / SHARDS[0]).stat().st_mode)
    assert mode == 0o640


def test_too_little_room_is_said_before_anything_is_fetched(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: used._replace(free=100))
    with pytest.raises(WriteError) as caught:
        loadkit.load("org/toy")
    assert caught.value.errno == errno.ENOSPC
    assert not [p for p in (repo_of(tmp_path) / "blobs").iterdir() if len(p.name) == 64]


def test_a_source_closes_what_it_opened(hub: Hub) -> None:
    loadkit.load("org/toy")
    before = len(list(Path("/proc/self/fd").iterdir()))
    threads = threading.active_count()
    with open_source("org/toy", LoadConfig()) as source:
        for info in source.list():
            source.open(info.name).read(0, 1)
    until = time.monotonic() + 5  # the server of this process closes its ends a little later
    while (count := len(list(Path("/proc/self/fd").iterdir()))) > before:
        assert time.monotonic() < until, count
        time.sleep(0.02)
    assert threading.active_count() <= threads
