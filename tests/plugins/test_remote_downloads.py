"""Downloads: once for all processes, gone on with after whatever happened, whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import loadkit
from helpers.checkpoints import write_llama, write_shards
from helpers.web_server import WebServer, cut, lie, status, touch_later
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.errors import DownloadError, PlanError, WriteError
from loadkit.network import patience
from loadkit_remote import cache, download

TESTS = Path(__file__).resolve().parent.parent


@pytest.fixture
def web(tmp_path: Path) -> Iterator[WebServer]:
    (tmp_path / "web").mkdir()
    with WebServer(tmp_path / "web") as server:
        yield server


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "FIRST_WAIT", 0.01)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)


def big(web: WebServer, shards: int = 1) -> dict[str, torch.Tensor]:
    """A checkpoint of some 4 MB."""
    return write_llama(
        web.folder, shards=shards, hidden=240, heads=6, kv_heads=3, ffn=480, vocab=1000
    )


def load(web: WebServer, tmp_path: Path, **options: Any) -> loadkit.LoadResult:
    config = LoadConfig(**{"cache_dir": str(tmp_path / "cache"), **options})
    return loadkit.load(f"{web.url}/", load_config=config)


def kept(tmp_path: Path, name: str = "model.safetensors") -> Path:
    (found,) = (tmp_path / "cache").glob(f"remote/*/{name}")
    return found


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def weights_sent(web: WebServer) -> int:
    """Bytes of weight files that were sent past their starts."""
    return sum(
        each.sent
        for each in web.requests
        if each.name.endswith(".safetensors") and each.asked.get("range") != "bytes=0-65535"
    )


def test_a_load_downloads_once_and_reads_the_copy(web: WebServer, tmp_path: Path) -> None:
    state = big(web, shards=2)
    first = load(web, tmp_path)
    assert first.report.reader == "mmap"
    assert first.report.seconds["download"] > 0
    for name, tensor in state.items():
        if "norm" in name:
            assert torch.equal(first.model.get_parameter(name), tensor)
    once = weights_sent(web)
    assert once == sum(file.stat().st_size for file in web.folder.glob("*.safetensors"))
    again = load(web, tmp_path)
    assert weights_sent(web) == once
    assert again.report.bytes_fetched < first.report.bytes_fetched
    for file in web.folder.glob("*.safetensors"):
        assert sha256(kept(tmp_path, file.name)) == sha256(file)


def test_what_does_not_fit_is_refused_before_it_is_downloaded(
    web: WebServer, tmp_path: Path
) -> None:
    big(web)
    config = json.loads((web.folder / "config.json").read_text())
    (web.folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    with pytest.raises(PlanError, match="SHAPE_MISMATCH"):
        load(web, tmp_path)
    assert not weights_sent(web)
    assert not list((tmp_path / "cache").glob("remote/*/model.safetensors"))


def test_a_live_module_is_filled_from_a_download(web: WebServer, tmp_path: Path) -> None:
    weights = big(web)
    module = torch.nn.Module()
    module.model = torch.nn.Module()
    module.model.norm = torch.nn.LayerNorm(240, bias=False)
    memory = module.model.norm.weight.data_ptr()
    config = LoadConfig(cache_dir=str(tmp_path / "cache"))
    loadkit.load_into(module, f"{web.url}/", load_config=config, strict=False)
    assert torch.equal(module.model.norm.weight, weights["model.norm.weight"])
    assert module.model.norm.weight.data_ptr() == memory


def test_another_content_is_downloaded_anew(web: WebServer, tmp_path: Path) -> None:
    big(web)
    load(web, tmp_path)
    write_llama(web.folder, seed=1, hidden=240, heads=6, kv_heads=3, ffn=480, vocab=1000)
    touch_later(web.folder / "model.safetensors")
    load(web, tmp_path)
    assert sha256(kept(tmp_path)) == sha256(web.folder / "model.safetensors")


def test_download_dir_holds_the_files_by_their_names(web: WebServer, tmp_path: Path) -> None:
    big(web)
    load(web, tmp_path, download_dir=str(tmp_path / "here"))
    assert sha256(tmp_path / "here/model.safetensors") == sha256(web.folder / "model.safetensors")
    assert not (tmp_path / "cache").exists()


def test_iter_weights_downloads_too(web: WebServer, tmp_path: Path) -> None:
    state = big(web)
    config = LoadConfig(cache_dir=str(tmp_path / "cache"))
    found = dict(loadkit.iter_weights(f"{web.url}/", load_config=config))
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert kept(tmp_path).is_file()


def test_fault_17_a_download_that_was_cut_is_resumed_and_whole(
    web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "CHUNK", 1 << 20)
    big(web)
    file = web.folder / "model.safetensors"
    web.queue(*[cut(300_000)] * 3, name=file.name, big=True)
    load(web, tmp_path, num_threads=2)
    assert sha256(kept(tmp_path)) == sha256(file)
    parts = [each for each in web.requests if each.name == file.name][1:]
    assert {each.asked["if-range"] for each in parts} == {web.etag(file)}
    assert weights_sent(web) == file.stat().st_size  # no byte twice


def test_fault_17_a_later_try_fetches_what_is_missing(
    web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "CHUNK", 1 << 20)
    big(web)
    file = web.folder / "model.safetensors"
    size = file.stat().st_size

    def fails_late(noted: Any) -> Any:
        first = int(noted.asked["range"][6:].partition("-")[0])
        return status(418) if noted.name == file.name and first >= 2 << 20 else None

    web.always = fails_late
    with pytest.raises(DownloadError):
        load(web, tmp_path, num_threads=1)
    assert weights_sent(web) == 2 << 20
    assert not list((tmp_path / "cache").glob("remote/*/model.safetensors"))
    web.always = None
    load(web, tmp_path)
    assert weights_sent(web) == size
    assert sha256(kept(tmp_path)) == sha256(file)
    left = [path.name for path in kept(tmp_path).parent.rglob("*") if "part" in path.name]
    assert left == []


@pytest.mark.parametrize("what", ["content", "boot", "rubbish", "numbers"])
def test_fault_17_a_part_that_does_not_count_is_fetched_anew(
    web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(download, "CHUNK", 1 << 20)
    big(web)
    file = web.folder / "model.safetensors"
    web.always = lambda noted: (
        status(418) if noted.asked["range"].startswith("bytes=2097152") else None
    )
    with pytest.raises(DownloadError):
        load(web, tmp_path, num_threads=1)
    web.always = None
    (journal,) = (tmp_path / "cache").glob("remote/*/.loadkit/*.part.json")
    if what == "content":
        big(web)
        touch_later(file)
    elif what == "rubbish":
        journal.write_bytes(b"{")
    else:
        said = json.loads(journal.read_bytes())
        said |= {"boot": "another"} if what == "boot" else {"done": [0, 99]}
        journal.write_text(json.dumps(said))
    before = weights_sent(web)
    load(web, tmp_path)
    assert weights_sent(web) - before == file.stat().st_size
    assert sha256(kept(tmp_path)) == sha256(file)


@pytest.mark.slow
def test_fault_17_a_killed_process_leaves_what_the_next_one_goes_on_with(
    web: WebServer, tmp_path: Path
) -> None:
    state = {"a": torch.randn(20 << 20)}  # 80 MB: five chunks
    write_shards(web.folder, state, 1, index=False)
    (web.folder / "model-00001-of-00001.safetensors").rename(web.folder / "model.safetensors")
    file = web.folder / "model.safetensors"
    web.rate = 40e6
    code = (
        "import sys, loadkit\n"
        "from loadkit.config import LoadConfig\n"
        "config = LoadConfig(cache_dir=sys.argv[2], num_threads=1)\n"
        "for _ in loadkit.iter_weights(sys.argv[1], load_config=config): pass\n"
    )
    arguments = [sys.executable, "-c", code, f"{web.url}/", str(tmp_path / "cache")]
    child = subprocess.Popen(arguments)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "cache").glob("remote/*/.loadkit/*.part.json")):
        assert time.monotonic() < deadline
        assert child.poll() is None
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    web.rate = 0
    before = weights_sent(web)
    subprocess.run(arguments, check=True)
    assert weights_sent(web) - before <= file.stat().st_size - download.CHUNK
    assert sha256(kept(tmp_path)) == sha256(file)


@pytest.mark.slow
def test_fault_25_of_many_processes_one_downloads(web: WebServer, tmp_path: Path) -> None:
    big(web, shards=2)
    web.rate = 4e6
    script = TESTS / "helpers" / "fetching.py"
    arguments = [sys.executable, str(script), f"{web.url}/", str(tmp_path / "cache")]
    children = [
        subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    answers = [child.communicate(timeout=200) for child in children]
    assert [child.returncode for child in children] == [0] * 8, answers[0][1]
    said = [json.loads(out) for out, _ in answers]
    assert len({each["digest"] for each in said}) == 1
    size = sum(file.stat().st_size for file in web.folder.glob("*.safetensors"))
    assert weights_sent(web) == size
    assert any("waiting for another process" in errors for _, errors in answers)


def test_fault_27_a_folder_that_cannot_be_written_to(
    web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    big(web)
    load(web, tmp_path)
    real = os.open

    def read_only(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_CREAT and ".loadkit" in str(path):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", read_only)
    load(web, tmp_path)  # what is there is used, no lock is asked for
    with pytest.raises(WriteError, match="cannot lock") as caught:
        load(web, tmp_path, cache_dir=str(tmp_path / "other"))
    assert caught.value.errno == errno.EROFS
    assert "cache_dir" in str(caught.value)


def test_fault_27_a_file_system_without_locks(
    web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    big(web)
    monkeypatch.setattr(fcntl, "flock", none)
    load(web, tmp_path)
    assert "no locks there" in caplog.text
    assert sha256(kept(tmp_path)) == sha256(web.folder / "model.safetensors")
    assert [path.name for path in kept(tmp_path).parent.rglob("*.part*")] == []


def test_no_room_on_the_disk(
    web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    big(web)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _: type("Disk", (), {"free": 1000}))
    with pytest.raises(WriteError, match="No space left") as caught:
        load(web, tmp_path)
    assert caught.value.errno == errno.ENOSPC
    assert "stream=true" in str(caught.value)


def test_bytes_that_change_while_they_are_downloaded(
    web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "CHUNK", 1 << 20)
    big(web)
    web.queue(lie(ETag='"another"'), name="model.safetensors", big=True)
    with pytest.raises(DownloadError, match="changed while it was read"):
        load(web, tmp_path, num_threads=1)
    assert not list((tmp_path / "cache").glob("remote/*/model.safetensors"))


def test_a_server_without_etags_and_times_is_asked_each_time(
    web: WebServer, tmp_path: Path
) -> None:
    big(web)
    web.always = lambda _: lie(ETag=None, Last_Modified=None)
    load(web, tmp_path)
    once = weights_sent(web)
    load(web, tmp_path)
    assert weights_sent(web) == 2 * once


def test_signatures_do_not_make_copies(web: WebServer, tmp_path: Path) -> None:
    big(web)
    config = LoadConfig(cache_dir=str(tmp_path / "cache"))
    for number in range(2):
        uri = f"{web.url}/model.safetensors?X-Amz-Signature={number}"
        loadkit.load(uri, load_config=config)
    assert len(list((tmp_path / "cache").glob("remote/*"))) == 1
    assert not any("Signature" in str(path) for path in (tmp_path / "cache").rglob("*"))


def test_ranks_of_one_machine_share_a_download(
    web: WebServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    big(web)
    config = LoadConfig(cache_dir=str(tmp_path / "cache"))
    for rank in range(3):
        parallel = ParallelConfig(tp_size=3, tp_rank=rank)
        loadkit.load(f"{web.url}/", load_config=config, parallel=parallel)
    assert weights_sent(web) == (web.folder / "model.safetensors").stat().st_size
    assert caplog.text.count("fetching") == 1
    assert cache.folder_of(config, f"{web.url}/").is_dir()
