"""A hub that cuts, stalls, lies or is rude: what comes is right, or a typed error in time."""

from __future__ import annotations

import gzip
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import loadkit
from helpers.checkpoints import write_llama
from helpers.hub_server import TOKEN, Hub, Request, ask_hub, hub_server
from loadkit.config import LoadConfig
from loadkit.errors import DownloadError, IntegrityError, LoadkitError, PathError
from loadkit.network import patience
from loadkit_hub import blobs

WEIGHTS = "model.safetensors"
BOTH = pytest.mark.parametrize("stream", [False, True], ids=["download", "stream"])
Answer = Callable[[Request, str], Any]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Llama of about 1 MB in one file. Pauses between attempts are short."""
    write_llama(tmp_path / "toy", hidden=64, ffn=256, vocab=500)
    monkeypatch.setattr(patience, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(patience, "LONGEST_WAIT", 0.1)
    with hub_server(org__toy=tmp_path / "toy") as server:
        ask_hub(server, tmp_path / "home", monkeypatch)
        yield server


def config(stream: bool = False, **more: Any) -> LoadConfig:
    given: dict[str, Any] = {"network_timeout": 2.0, "network_deadline": 5.0} | more
    return LoadConfig(stream=stream, **given)


def refused(load_config: LoadConfig) -> LoadkitError:
    """The error of a load that must fail within 2 s; nothing half-fetched is in place."""
    began = time.monotonic()
    with pytest.raises(LoadkitError) as caught:
        loadkit.load("org/toy", load_config=load_config)
    assert time.monotonic() - began < 2 + load_config.network_deadline
    return caught.value


def same(result: Any, folder: Path) -> None:
    expected = loadkit.load_model(folder).state_dict()
    assert all(torch.equal(expected[k], v) for k, v in result.model.state_dict().items())


def blobs_of(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "home" / "hub" / "models--org--toy" / "blobs"
    return sorted(folder.iterdir()) if folder.exists() else []


# -- what passes ---------------------------------------------------------------------------------


@BOTH
def test_fault_17_a_cut_transfer_goes_on_where_it_was_cut(
    hub: Hub, tmp_path: Path, stream: bool
) -> None:
    hub.answer = lambda request, name: (
        ("cut", 150_000) if request.where == "cdn" and name == WEIGHTS else None
    )
    result = loadkit.load("org/toy", load_config=config(stream, verify="digest"))
    same(result, tmp_path / "toy")
    size = (tmp_path / "toy" / WEIGHTS).stat().st_size
    starts = [r.headers["range"] for r in hub.requests if r.where == "cdn"]
    assert len(starts) > size // 150_000
    assert any("if-match" in r.headers for r in hub.requests if r.where == "cdn")
    assert hub.bytes_of(WEIGHTS) < 3 * size  # nothing is fetched from its start again


def test_fault_17_a_later_process_resumes_what_an_earlier_one_left(
    hub: Hub, tmp_path: Path
) -> None:
    size = (tmp_path / "toy" / WEIGHTS).stat().st_size
    seen: Counter[str] = Counter()

    def once(request: Request, name: str) -> Any:
        if request.where != "cdn" or name != WEIGHTS or request.headers["range"][:8] == "bytes=0-":
            seen[request.where] += request.where == "cdn"
            return ("cut", 200_000) if seen["cdn"] > 1 else None
        return ("status", 404, {})

    hub.answer = once
    with pytest.raises(LoadkitError):
        loadkit.load("org/toy", load_config=config())
    oid = hub.oid(tmp_path / "toy" / WEIGHTS)
    (partial,) = [p for p in blobs_of(tmp_path) if p.name == f"{oid}.loadkit.incomplete"]
    assert 0 < partial.stat().st_size < size
    hub.answer = lambda request, name: None
    hub.requests.clear()
    same(loadkit.load("org/toy", load_config=config(verify="digest")), tmp_path / "toy")
    ranges = [r.headers["range"] for r in hub.requests if r.where == "cdn"]
    assert f"bytes={200_000}-{size - 1}" in ranges


def test_a_partial_file_with_wrong_bytes_is_fetched_from_its_start(
    hub: Hub, tmp_path: Path
) -> None:
    folder = tmp_path / "home" / "hub" / "models--org--toy" / "blobs"
    folder.mkdir(parents=True)
    oid = hub.oid(tmp_path / "toy" / WEIGHTS)
    (folder / f"{oid}.loadkit.incomplete").write_bytes(b"\0" * 5000)
    same(loadkit.load("org/toy", load_config=config()), tmp_path / "toy")


@BOTH
@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("where", ["hub", "cdn"])
def test_fault_20_a_busy_server_is_asked_again_when_it_says(
    hub: Hub,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    status: int,
    where: str,
    stream: bool,
) -> None:
    caplog.set_level(logging.INFO)
    count: Counter[str] = Counter()

    def busy(request: Request, name: str) -> Any:
        if request.where != where:
            return None
        count[request.path] += 1
        return ("status", status, {"Retry-After": "0"}) if count[request.path] <= 3 else None

    hub.answer = busy
    same(loadkit.load("org/toy", load_config=config(stream)), tmp_path / "toy")
    assert f"the server answered {status}" in caplog.text and "attempt 3 failed" in caplog.text


def test_fault_24_a_clock_that_jumps_changes_no_deadline(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 1e6 * (int(real() * 1000) % 2))
    same(loadkit.load("org/toy", load_config=config()), tmp_path / "toy")


@BOTH
def test_fault_24_a_signed_address_that_expires_is_renewed_once(
    hub: Hub, tmp_path: Path, stream: bool
) -> None:
    def expire(request: Request, name: str) -> Any:
        if request.where == "cdn" and hub.signature == "SIGNED":
            hub.signature = "RENEWED"
            return ("cut", 100_000)
        return None

    hub.answer = expire
    same(loadkit.load("org/toy", load_config=config(stream)), tmp_path / "toy")
    assert hub.signature == "RENEWED"


def test_fault_24_credentials_that_stay_refused_are_an_auth_error_without_the_secret(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    ask_hub(hub, tmp_path / "home", monkeypatch, token=TOKEN)
    hub.signature = "SIG-SECRET"
    hub.answer = lambda request, name: ("status", 403, {}) if request.where == "cdn" else None
    error = refused(config())
    assert error.code == "E_AUTH"
    said = f"{error} {error.to_dict()} {error.__cause__!r} {caplog.text}"
    assert TOKEN not in said and "SIG-SECRET" not in said


# -- what does not pass --------------------------------------------------------------------------


@BOTH
def test_fault_19_a_stall_ends_at_the_deadline(hub: Hub, stream: bool) -> None:
    done = threading.Event()
    hub.answer = lambda request, name: done.wait(20) and None if request.where == "cdn" else None
    began = time.monotonic()
    try:
        with pytest.raises(DownloadError) as caught:
            loadkit.load(
                "org/toy",
                load_config=LoadConfig(stream=stream, network_timeout=0.2, network_deadline=0.7),
            )
    finally:
        done.set()
    assert caught.value.code == "E_TIMEOUT" and time.monotonic() - began < 3


def test_fault_19_a_hub_that_stalls_at_once_is_left_for_the_cache(hub: Hub, tmp_path: Path) -> None:
    loadkit.load("org/toy", load_config=config())
    done = threading.Event()
    hub.answer = lambda request, name: done.wait(20) and None
    try:
        limits = LoadConfig(network_timeout=0.2, network_deadline=0.6)
        same(loadkit.load("org/toy", load_config=limits), tmp_path / "toy")
    finally:
        done.set()


@pytest.mark.parametrize("etag", ["../../x", "x" * 10_240, "", "a\tb", '"/etc/passwd"'])
@pytest.mark.parametrize("header", ["ETag", "X-Linked-Etag"])
def test_W01_an_etag_is_never_a_files_name(
    hub: Hub, tmp_path: Path, etag: str, header: str
) -> None:
    wanted = "config.json" if header == "ETag" else WEIGHTS
    hub.answer = lambda request, name: (
        ("headers", {header: etag or " "}) if request.where == "hub" and name == wanted else None
    )
    error = refused(config())
    assert isinstance(error, DownloadError) and error.code == "E_DOWNLOAD"
    assert len(str(error)) < 1000
    kept = [p for p in tmp_path.rglob("*") if p.name == "x" or "passwd" in p.name]
    assert kept == []


@pytest.mark.parametrize(
    "target",
    [
        "file:///etc/passwd",
        "ftp://127.0.0.1/x",
        "http://169.254.169.254/latest/meta-data",
        "http://[::ffff:169.254.169.254]/x",
        "http://user:hunter2@127.0.0.1/x",
        "//",
        "http://127.0.0.1:99999999/",
        "gopher://x",
    ],
)
def test_W03_a_redirect_to_where_it_may_not_lead_is_refused(hub: Hub, target: str) -> None:
    hub.answer = lambda request, name: (
        ("status", 302, {"Location": target}) if name == WEIGHTS else None
    )
    error = refused(config(network_timeout=0.3, network_deadline=1.0))
    assert isinstance(error, DownloadError) and error.code == "E_DOWNLOAD"
    assert "redirect" in str(error) and "hunter2" not in str(error)


@BOTH
def test_a_host_of_large_files_that_is_not_reached_is_offline(hub: Hub, stream: bool) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{unused.getsockname()[1]}/x"
    hub.answer = lambda request, name: (
        ("status", 302, {"Location": gone}) if name == WEIGHTS else None
    )
    error = refused(config(stream))
    assert error.code == "E_OFFLINE" and "cannot be reached: Connection refused" in str(error)


def test_W03_a_redirect_loop_ends(hub: Hub) -> None:
    hub.answer = lambda request, name: (
        ("status", 302, {"Location": request.path}) if name == WEIGHTS else None
    )
    assert "redirects" in str(refused(config()))


@BOTH
def test_W04_a_body_without_an_end_is_read_no_further_than_asked(
    hub: Hub, tmp_path: Path, stream: bool
) -> None:
    def endless(request: Request, name: str) -> Any:
        return ("headers", {"Content-Length": str(1 << 40)}) if request.where == "cdn" else None

    hub.answer = endless
    error = refused(config(stream))
    assert error.code == "E_DOWNLOAD" and "Content-Length" in str(error)


def test_W05_a_compressed_body_is_refused_unread(hub: Hub) -> None:
    bomb = gzip.compress(b"\0" * (1 << 20))
    hub.answer = lambda request, name: (
        ("body", bomb, {"Content-Encoding": "gzip"}) if name == "config.json" else None
    )
    assert "was not asked for" in str(refused(config()))
    hub.answer = lambda request, name: (
        ("body", bomb, {"Content-Encoding": "gzip"}) if "/tree/" in request.path else None
    )
    assert refused(config()).code == "E_DOWNLOAD"


@BOTH
@pytest.mark.parametrize("given", ["bytes 0-9/10", "bytes 5-4/3", "", "bytes */10", "items 0-1/2"])
def test_W07_a_wrong_content_range_is_refused(hub: Hub, given: str, stream: bool) -> None:
    hub.answer = lambda request, name: (
        ("headers", {"Content-Range": given}) if request.where == "cdn" else None
    )
    assert refused(config(stream)).code == "E_DOWNLOAD"


def test_W08_the_whole_file_in_place_of_a_range_is_refused(hub: Hub, tmp_path: Path) -> None:
    whole = (tmp_path / "toy" / WEIGHTS).read_bytes()
    hub.answer = lambda request, name: ("body", whole) if request.where == "cdn" else None
    error = refused(config(stream=True))
    assert "with all of it" in str(error)


def test_W09_a_file_that_changes_between_two_reads_is_noticed(hub: Hub) -> None:
    count: Counter[str] = Counter()

    def change(request: Request, name: str) -> Any:
        if request.where != "cdn":
            return None
        count["cdn"] += 1
        return ("headers", {"ETag": f'"v{count["cdn"]}"'})

    hub.answer = change
    error = refused(config(stream=True))
    assert error.code == "E_DOWNLOAD" and "changed while it was read" in str(error)


def test_a_flipped_byte_of_the_same_size_never_gets_into_the_cache(
    hub: Hub, tmp_path: Path
) -> None:
    path = tmp_path / "toy" / WEIGHTS
    hub.oid(path)  # as it was listed
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)
    error = refused(config())
    assert isinstance(error, IntegrityError) and error.file == WEIGHTS
    assert not [p for p in blobs_of(tmp_path) if len(p.name) == 64]


def test_a_flipped_byte_in_a_small_file_is_noticed_too(hub: Hub, tmp_path: Path) -> None:
    right = hub.oid(tmp_path / "toy" / "config.json")
    hub.oids["config.json"] = right
    listed = hub.listed("org/toy")
    hub.listed = lambda repo: listed  # type: ignore[method-assign]
    path = tmp_path / "toy" / "config.json"
    path.write_text(path.read_text().replace("1e-05", "2e-05"))
    error = refused(config())
    assert isinstance(error, IntegrityError) and error.file == "config.json"


# -- listings ------------------------------------------------------------------------------------


def item(**more: Any) -> dict[str, Any]:
    return {"type": "file", "path": "a.json", "size": 3, "oid": "a" * 40} | more


@pytest.mark.parametrize(
    "page",
    [
        pytest.param([item(path="../x")], id="out"),
        pytest.param([item(path="/abs")], id="absolute"),
        pytest.param([item(path="a\\b")], id="windows"),
        pytest.param([item(path=3)], id="number"),
        pytest.param([item(oid="../../x")], id="digest"),
        pytest.param([item(size=-1)], id="negative"),
        pytest.param([item(size=True)], id="boolean"),
        pytest.param([item(lfs={"oid": "b" * 40, "size": 3})], id="short"),
        pytest.param([item(lfs=[])], id="list"),
        pytest.param({"error": "x"}, id="object"),
        pytest.param("x", id="text"),
    ],
)
def test_a_listing_that_lies_is_refused(hub: Hub, tmp_path: Path, page: object) -> None:
    hub.listed = lambda repo: page  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises((DownloadError, PathError)):
        loadkit.plan("org/toy", load_config=config())
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"sha": "../x"}'])
def test_an_answer_that_is_no_commit_is_refused(hub: Hub, body: bytes) -> None:
    hub.answer = lambda request, name: ("body", body) if "/revision/" in request.path else None
    assert refused(config()).code == "E_DOWNLOAD"


def test_a_listing_that_goes_on_elsewhere_is_not_followed(hub: Hub) -> None:
    links = {"Link": '<http://localhost:1/x>; rel="next"'}
    hub.answer = lambda request, name: ("body", b"[]", links) if "/tree/" in request.path else None
    assert refused(config()).code == "E_DOWNLOAD"


def test_a_server_that_hangs_up_is_left_after_a_few_attempts(hub: Hub) -> None:
    hub.answer = lambda request, name: 1 // 0 if "/tree/" in request.path else None
    with pytest.raises(DownloadError, match=f"{patience.MAX_ATTEMPTS} times") as caught:
        loadkit.plan("org/toy")
    assert caught.value.code == "E_DOWNLOAD"


def test_a_failed_transfer_ends_the_others(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, real = threading.Event(), blobs.fetch_blob

    def fails(cache: Any, commit: str, entry: Any, *rest: Any) -> None:
        if entry.name == "config.json":
            begun.wait(5)
            raise DownloadError("first")
        begun.set()
        real(cache, commit, entry, *rest)

    monkeypatch.setattr("loadkit_hub.source.fetch_blob", fails)
    with pytest.raises(DownloadError, match="first"):
        loadkit.load("org/toy", load_config=config())
