"""``http://``: plans by ranges, streams, and servers that do not keep to what is expected."""

from __future__ import annotations

import hashlib
import logging
import re
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import loadkit
from helpers.checkpoints import write_llama, write_sparse_llama
from helpers.web_server import (
    Noted,
    WebServer,
    cut,
    lie,
    redirect,
    stall,
    status,
    touch_later,
)
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.errors import (
    DownloadError,
    IntegrityError,
    OptionError,
    PathError,
    PlanError,
    ReadError,
    TruncatedError,
)
from loadkit.manifest import MANIFEST, FileEntry, Manifest, TensorEntry, manifest_bytes
from loadkit.network import patience
from loadkit.safetensors_format import read_header
from loadkit.sources import open_source
from loadkit.sources.base import Source
from loadkit.sources.local_file import LocalFile

FILE = "weights.safetensors"
SIZE = 300_000
QUICK = {"network_timeout": 0.3, "network_deadline": 1.0}


@pytest.fixture
def web(tmp_path: Path) -> Iterator[WebServer]:
    folder = tmp_path / "web"
    folder.mkdir()
    with WebServer(folder) as server:
        yield server


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def data(web: WebServer) -> bytes:
    """What ``FILE`` holds."""
    found = torch.randint(0, 256, (SIZE,), dtype=torch.uint8).numpy().tobytes()
    (web.folder / FILE).write_bytes(found)
    return found


def opened(uri: str, **options: Any) -> Source:
    return open_source(uri, LoadConfig(**options))


def fetched(uri: str, start: int = 100_000, nbytes: int = 150_000, **options: Any) -> bytes:
    """Bytes of the one file, past what was read when it was opened."""
    with opened(uri, stream=True, **options) as source:
        return source.open(FILE).read(start, nbytes)


def whole_text(error: BaseException) -> str:
    """All that anybody would print of an error."""
    lines = traceback.format_exception(error)
    known = error.to_dict() if isinstance(error, loadkit.LoadkitError) else ""
    return f"{''.join(lines)}{error!r}{known}"


# -- plans and streams ---------------------------------------------------------------------------


def test_a_plan_reads_headers_alone_and_says_how_many_bytes(web: WebServer) -> None:
    write_sparse_llama(
        web.folder / "m", layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, files=30
    )  # 70B: 141 GB
    size = sum(file.stat().st_size for file in (web.folder / "m").iterdir())
    plan = loadkit.plan(f"{web.url}/m", parallel=ParallelConfig(tp_size=8, tp_rank=3))
    assert plan.ok
    assert size > 140e9
    assert plan.bytes_fetched == web.sent() < size / 10_000
    assert plan.to_dict()["bytes_fetched"] == plan.bytes_fetched
    note = next(note for note in plan.notes if note.code == "DOWNLOAD")
    assert "30 whole file(s)" in note.message


@pytest.mark.parametrize("shards", [1, 3])
def test_a_stream_reads_what_its_plan_says_into_equal_parameters(
    web: WebServer, shards: int
) -> None:
    folder = web.folder / "m"
    write_llama(folder, shards=shards, hidden=240, heads=6, kv_heads=3, ffn=480, vocab=3000)
    for rank in range(3):
        parallel = ParallelConfig(tp_size=3, tp_rank=rank)
        config = LoadConfig(stream=True)
        before = web.sent()
        plan = loadkit.plan(f"{web.url}/m", parallel=parallel, load_config=config)
        planned = web.sent() - before
        result = loadkit.load(f"{web.url}/m", parallel=parallel, load_config=config)
        local = loadkit.load(folder, parallel=parallel)
        for (name, mine), (_, theirs) in zip(
            result.model.named_parameters(), local.model.named_parameters(), strict=True
        ):
            assert torch.equal(mine, theirs), name
        report = result.report
        assert report.reader == "range"
        assert report.bytes_read == plan.bytes_to_read
        assert report.requests == plan.requests
        assert report.bytes_fetched == planned + report.bytes_read
        assert report.bytes_read < sum(f.stat().st_size for f in folder.glob("*.safetensors")) / 2
        assert not list(folder.parent.glob("**/.loadkit"))


def test_an_error_of_a_range_names_file_tensor_and_offset(web: WebServer) -> None:
    write_llama(web.folder, hidden=240, heads=6, kv_heads=3, ffn=480, vocab=3000)
    web.always = lambda noted: status(418) if noted.asked["range"][:8] != "bytes=0-" else None
    with pytest.raises(DownloadError) as caught:
        loadkit.load(f"{web.url}/", load_config=LoadConfig(stream=True))
    error = caught.value
    assert error.file == "model.safetensors"
    assert error.tensor is not None
    assert error.offset is not None
    assert error.exit_code == 3


def test_one_gguf_file_is_found_with_what_lies_beside_it(web: WebServer) -> None:
    (web.folder / "x.gguf").write_bytes(b"GGUF" + bytes(100))
    (web.folder / "config.json").write_text("{}")
    with opened(f"{web.url}/x.gguf", stream=True) as source:
        assert [info.name for info in source.list()] == ["config.json", "x.gguf"]
        assert source.open("x.gguf").read(0, 4) == b"GGUF"


def test_a_small_read_brings_a_block_and_the_next_ones_ask_nothing(
    web: WebServer, data: bytes
) -> None:
    with opened(f"{web.url}/{FILE}", stream=True) as source:
        file = source.open(FILE)
        got = [file.read(at, 8) for at in range(0, 60_000, 6_000)]
        assert len(web.requests) == 1
        got += [file.read(at, 8) for at in range(100_000, 160_000, 6_000)]
        assert len(web.requests) == 2
        assert file.read(60_000, 100_000) == data[60_000:160_000]
        assert len(web.requests) == 3
        assert web.requests[-1].sent < 100_000  # the start was here
        places = [*range(0, 60_000, 6_000), *range(100_000, 160_000, 6_000)]
        assert got == [data[at : at + 8] for at in places]
        with pytest.raises(TruncatedError):
            file.read(SIZE - 4, 8)
        assert len(web.requests) == 3


def test_reads_here_and_there_find_the_blocks_of_the_ones_before(
    web: WebServer, data: bytes
) -> None:
    places = [0, 70_000, 140_000, 210_000, 280_000]
    with opened(f"{web.url}/{FILE}", stream=True) as source:
        file = source.open(FILE)
        for step in range(0, 10_000, 1000):
            assert [file.read(at + step, 8) for at in places] == [
                data[at + step : at + step + 8] for at in places
            ]
        assert len(web.requests) == len(places)


def test_an_address_may_be_written_as_people_write_it(web: WebServer) -> None:
    folder = web.folder / "mo d\u00e8le"
    folder.mkdir()
    (folder / "x[1].gguf").write_bytes(b"GGUF" + bytes(100))
    for path in ("mo d\u00e8le/x[1].gguf", "mo%20d%C3%A8le/x%5B1%5D.gguf"):
        with opened(f"{web.url}/{path}?a=b%2Fc&d=\u00e9", stream=True) as source:
            assert source.open("x[1].gguf").read(0, 4) == b"GGUF"
        assert web.requests[-1].query == "a=b%2Fc&d=%C3%A9"
    uri = web.url.replace("127.0.0.1", "b\u00fccher.invalid")
    with pytest.raises(DownloadError, match=r"xn--bcher-kva\.invalid"):
        opened(f"{uri}/x.gguf", **QUICK).list()


def test_a_name_that_is_not_there(web: WebServer) -> None:
    with pytest.raises(PathError, match=r"there is no .*/none\.gguf"):
        loadkit.plan(f"{web.url}/none.gguf")
    with opened(f"{web.url}/", stream=True) as source:
        with pytest.raises(ReadError):
            source.open("none.safetensors")
        with pytest.raises(PathError):
            source.open("../up.safetensors")


def test_a_scheme_whose_distribution_is_switched_off_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOADKIT_DISABLE_PLUGINS", "loadkit-remote")
    code = (
        "import loadkit\n"
        "try: loadkit.plan('s3://bucket/folder')\n"
        "except loadkit.errors.NotInstalledError as error: print(error)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "loadkit-remote, which is switched off" in ran.stdout
    assert "LOADKIT_DISABLE_PLUGINS" in ran.stdout


# -- options -------------------------------------------------------------------------------------


def test_options_that_contradict_a_stream(web: WebServer) -> None:
    write_llama(web.folder)
    for options in (
        {"download_dir": "/tmp"},
        {"reader": "mmap"},
        {"safetensors_load_strategy": "eager"},
    ):
        with pytest.raises(OptionError, match="stream"):
            loadkit.load(f"{web.url}/", load_config=LoadConfig(stream=True, **options))


@pytest.mark.parametrize("uri", ["http://", "http:///x", "https://[::1/x", "http://h:99999/x"])
def test_an_address_of_no_server(uri: str) -> None:
    with pytest.raises((OptionError, DownloadError)):
        loadkit.plan(uri)


# -- servers that are not to be trusted ----------------------------------------------------------


@pytest.mark.parametrize(
    "etag",
    [
        pytest.param("../../x", id="W01-path"),
        pytest.param('"' + "x" * 10_000 + '"', id="W01-10-kB"),
        pytest.param("", id="W01-empty"),
        pytest.param('""', id="W01-nothing-in-it"),
        pytest.param('"a\r\n b"', id="W01-CR-LF"),
        pytest.param('"a b"', id="W01-space"),
    ],
)
def test_W01_an_etag_that_is_none(web: WebServer, data: bytes, etag: str) -> None:
    web.always = lambda _: lie(ETag=etag)
    with pytest.raises(DownloadError) as caught:
        fetched(f"{web.url}/{FILE}")
    assert (caught.value.code, caught.value.file) == ("E_DOWNLOAD", FILE)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "target",
    [
        pytest.param("http://169.254.169.254/latest/meta-data/iam", id="W03-metadata"),
        pytest.param("http://[fe80::1]/x", id="W03-link-local-6"),
        pytest.param("http://[::ffff:169.254.169.254]/x", id="W03-mapped"),
        pytest.param("http://0xA9FEA9FE/x", id="W03-hex"),
        pytest.param("http://0.0.0.0/x", id="W03-unspecified"),
        pytest.param("file:///etc/passwd", id="W03-file"),
        pytest.param("ftp://127.0.0.1/x", id="W03-ftp"),
        pytest.param("http://user:hunter2@127.0.0.1/x", id="W03-credentials"),
        pytest.param("http://[::1", id="W03-broken"),
        pytest.param("", id="W03-none"),
    ],
)
def test_W03_a_redirect_to_where_nobody_may_be_sent(
    web: WebServer, data: bytes, target: str
) -> None:
    web.always = lambda _: redirect(target)
    start = time.monotonic()
    with pytest.raises(DownloadError, match="redirect") as caught:
        fetched(f"{web.url}/{FILE}")
    assert time.monotonic() - start < 2
    assert caught.value.code == "E_DOWNLOAD"
    assert "hunter2" not in whole_text(caught.value)


def test_W03_redirects_end(web: WebServer, data: bytes) -> None:
    web.always = lambda _: redirect(f"/{FILE}")
    with pytest.raises(DownloadError, match="more than 5 redirects"):
        fetched(f"{web.url}/{FILE}")


def test_W03_credentials_stay_with_their_host(web: WebServer, data: bytes, tmp_path: Path) -> None:
    with WebServer(web.folder) as other:
        web.always = lambda _: redirect(f"{other.url}/{FILE}")
        uri = web.url.replace("http://", "http://user:hunter2@")
        assert fetched(f"{uri}/{FILE}") == data[100_000:250_000]
        assert {each.headers.get("authorization") for each in web.requests} == {
            "Basic dXNlcjpodW50ZXIy"
        }
        assert {each.headers.get("authorization") for each in other.requests} == {None}


def _signed(web: WebServer, other: WebServer, signature: list[str]) -> None:
    """Requests are sent on to another host, which wants the signature of the moment."""
    web.always = lambda _: redirect(f"{other.url}/{FILE}?Signature={signature[0]}")
    other.always = lambda noted: None if noted.query == f"Signature={signature[0]}" else status(403)


def test_fault_24_a_signed_address_is_remembered_and_asked_for_again_when_it_expires(
    web: WebServer, data: bytes
) -> None:
    signature = ["deadbeef1"]
    with WebServer(web.folder) as other, opened(f"{web.url}/{FILE}", stream=True) as source:
        _signed(web, other, signature)
        file = source.open(FILE)
        assert file.read(70_000, 70_000) == data[70_000:140_000]
        assert (len(web.requests), len(other.requests)) == (1, 2)
        signature[0] = "deadbeef2"
        assert file.read(140_000, 70_000) == data[140_000:210_000]
        assert (len(web.requests), len(other.requests)) == (2, 4)
        assert [each.status for each in other.requests] == [206, 206, 403, 206]
        assert other.requests[-1].asked["if-match"] == other.etag(web.folder / FILE)


def test_fault_24_a_signed_address_that_stays_refused_is_e_auth_without_the_signature(
    web: WebServer, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with WebServer(web.folder) as other, opened(f"{web.url}/{FILE}", stream=True) as source:
        _signed(web, other, ["deadbeef1"])
        file = source.open(FILE)
        other.always = lambda _: status(403)
        with pytest.raises(DownloadError) as caught:
            file.read(140_000, 70_000)
        assert caught.value.code == "E_AUTH"
        assert [each.status for each in other.requests] == [206, 403, 403]
    assert "deadbeef" not in whole_text(caught.value) + caplog.text


def test_a_host_that_a_redirect_led_to_and_that_is_gone_is_not_asked_for_ever(
    web: WebServer, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "FIRST_WAIT", 0.001)
    with opened(f"{web.url}/{FILE}", stream=True) as source:
        with WebServer(web.folder) as other:
            web.queue(redirect(f"{other.url}/{FILE}"))
            file = source.open(FILE)
            other.always = lambda _: cut(0)
        assert file.read(140_000, 70_000) == data[140_000:210_000]
        web.queue(lie(ETag='"another"'))
        with pytest.raises(DownloadError, match="changed while it was read"):  # and still held
            file.read(220_000, 70_000)


@pytest.mark.parametrize("length", ["unknown", "huge"])
def test_W04_an_endless_body(web: WebServer, data: bytes, length: str) -> None:
    def endless(handler: Any) -> None:
        handler.close_connection = True
        size = {"Content-Length": str(1 << 60)} if length == "huge" else {}
        handler.start(200, size)
        for _ in range(10_000):
            handler.send(bytes(1 << 16))

    web.always = lambda _: endless
    with pytest.raises(DownloadError, match="all of it"):
        fetched(f"{web.url}/{FILE}")
    assert web.sent() < 64 << 20


def test_W04_a_range_that_does_not_end(web: WebServer, data: bytes) -> None:
    def endless(handler: Any) -> None:
        handler.close_connection = True
        found = f"bytes 100000-249999/{SIZE}"
        etag = web.etag(web.folder / FILE)
        handler.start(206, {"Content-Range": found, "ETag": etag, "Connection": "close"})
        for _ in range(10_000):
            handler.send(bytes(1 << 16))

    web.queue(endless, big=True)
    assert fetched(f"{web.url}/{FILE}") == bytes(150_000)  # as many as were asked for, and no more
    assert web.sent() < 64 << 20


def test_W05_a_compressed_body(web: WebServer, data: bytes) -> None:
    web.always = lambda _: lie(Content_Encoding="gzip")
    with pytest.raises(DownloadError, match="Content-Encoding 'gzip'"):
        fetched(f"{web.url}/{FILE}")
    assert {each.headers["accept-encoding"] for each in web.requests} == {"identity"}


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(f"bytes 0-149999/{SIZE}", id="W07-elsewhere"),
        pytest.param(f"bytes 100000-149999/{SIZE}", id="W07-shorter"),
        pytest.param(f"bytes 100000-259999/{SIZE}", id="W07-longer"),
        pytest.param("bytes 100000-249999/*", id="W07-no-size"),
        pytest.param("bytes 100000-249999/999999999", id="W07-other-size"),
        pytest.param("bytes -1--2/-3", id="W07-negative"),
        pytest.param(f"items 100000-249999/{SIZE}", id="W07-unit"),
        pytest.param(None, id="W07-none"),
    ],
)
def test_W07_a_range_that_was_not_asked_for(web: WebServer, data: bytes, found: str | None) -> None:
    web.queue(lie(Content_Range=found), big=True)
    with pytest.raises(DownloadError) as caught:
        fetched(f"{web.url}/{FILE}")
    assert (caught.value.code, caught.value.offset) == ("E_DOWNLOAD", 100_000)


def _no_ranges(handler: Any) -> None:
    handler.noted.headers.pop("range", None)
    handler.serve()


def test_W08_all_of_a_file_where_a_range_was_asked_for(web: WebServer, data: bytes) -> None:
    web.always = lambda _: _no_ranges
    with pytest.raises(DownloadError, match="serve ranges"):
        fetched(f"{web.url}/{FILE}")
    web.always = None
    web.queue(_no_ranges, big=True)
    with pytest.raises(DownloadError) as caught:
        fetched(f"{web.url}/{FILE}")
    assert caught.value.code == "E_DOWNLOAD"
    (web.folder / FILE).write_bytes(data[:1000])  # a small file is taken
    web.always = lambda _: _no_ranges
    assert fetched(f"{web.url}/{FILE}", 10, 900) == data[10:910]


@pytest.mark.parametrize("knows", [True, False], ids=["W09-If-Match", "W09-ETag-alone"])
def test_W09_bytes_that_change_between_two_ranges(web: WebServer, data: bytes, knows: bool) -> None:
    with opened(f"{web.url}/{FILE}", stream=True) as source:
        file = source.open(FILE)
        assert file.read(100_000, 70_000) == data[100_000:170_000]
        (web.folder / FILE).write_bytes(bytes(SIZE))
        touch_later(web.folder / FILE)

        def forgetful(handler: Any) -> None:
            handler.noted.headers.pop("if-match", None)
            handler.noted.headers.pop("if-range", None)
            handler.serve()

        if not knows:
            web.always = lambda _: forgetful
        with pytest.raises(DownloadError, match="changed while it was read") as caught:
            file.read(180_000, 70_000)
        assert (caught.value.code, caught.value.file) == ("E_DOWNLOAD", FILE)
    asked = web.requests[-1].asked
    assert asked["if-match"] == asked["if-range"]


def test_W09_a_file_without_an_etag_is_held_by_its_time(web: WebServer, data: bytes) -> None:
    web.always = lambda _: lie(ETag=None)
    with opened(f"{web.url}/{FILE}", stream=True) as source:
        file = source.open(FILE)
        touch_later(web.folder / FILE)
        with pytest.raises(DownloadError, match="changed"):
            file.read(180_000, 70_000)


SECRET = "X-Amz-Credential=AKIASECRETKEY&X-Amz-Signature=deadbeefcafe"


@pytest.mark.parametrize("fails", ["absent", "denied", "broken", "slow"])
def test_W11_a_presigned_address_is_shown_nowhere(
    web: WebServer,
    data: bytes,
    fails: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    behaviour = {
        "absent": status(404),
        "denied": status(403),
        "broken": cut(10),
        "slow": stall(),
    }[fails]
    web.always = lambda _: behaviour
    with pytest.raises((DownloadError, ReadError)) as caught:
        fetched(f"{web.url}/{FILE}?{SECRET}", **QUICK)
    shown = whole_text(caught.value) + caplog.text
    assert not re.search("AKIASECRET|deadbeef|Signature", shown)
    assert f"{web.url}/{FILE}?***" in shown


def test_W11_a_presigned_address_works_and_no_report_has_it(
    web: WebServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    write_llama(web.folder)

    def signed(noted: Noted) -> Any:
        return None if noted.query == SECRET else status(403)

    web.always = signed
    result = loadkit.load(
        f"{web.url}/model.safetensors?{SECRET}", load_config=LoadConfig(stream=True)
    )
    told = f"{result.report.to_dict()} {result.plan.to_dict()} {caplog.text}"
    assert "deadbeef" not in told
    assert result.report.source == f"{web.url}/model.safetensors?***"


def test_W13_a_password_in_the_address_is_shown_nowhere(
    web: WebServer, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    from loadkit.cli import main

    caplog.set_level(logging.DEBUG)
    write_llama(web.folder)
    uri = web.url.replace("http://", "http://user:hunter2@")
    for arguments in (
        ["plan", uri],
        ["plan", uri, "--json"],
        ["load", uri, "--set", "stream=true"],
        ["inspect", uri],
        ["plan", f"{uri}/none.gguf", "--debug"],
    ):
        with pytest.raises(SystemExit):
            raise SystemExit(main(arguments))
    shown = caplog.text + "".join(capsys.readouterr())
    assert "hunter2" not in shown
    assert "***@127.0.0.1" in shown


def test_a_server_that_denies_is_e_auth(web: WebServer, data: bytes) -> None:
    web.always = lambda _: status(401)
    with pytest.raises(DownloadError) as caught:
        loadkit.plan(f"{web.url}/")
    assert caught.value.code == "E_AUTH"
    assert len(web.requests) < 40  # one for each name


# -- faults --------------------------------------------------------------------------------------


def test_fault_17_a_cut_answer_is_gone_on_with(
    web: WebServer, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    web.queue(cut(70_000), cut(0), cut(30_000), big=True)
    assert fetched(f"{web.url}/{FILE}") == data[100_000:250_000]
    ranges = [each.headers["range"] for each in web.requests[1:]]
    assert ranges == [
        "bytes=100000-249999",
        "bytes=170000-249999",
        "bytes=170000-249999",
        "bytes=200000-249999",
    ]
    assert all(each.headers["if-range"] == web.etag(web.folder / FILE) for each in web.requests[1:])
    assert caplog.text.count("again in") == 3


@pytest.mark.parametrize("after", [None, 20_000], ids=["silent", "stops"])
def test_fault_19_a_stall_ends_at_the_deadline(
    web: WebServer, data: bytes, after: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "MIN_RATE", 1 << 30)
    web.always = lambda noted: (
        None if noted.asked["range"].startswith("bytes=0-") else stall(after=after)
    )
    start = time.monotonic()
    with pytest.raises(DownloadError) as caught:
        fetched(f"{web.url}/{FILE}", **QUICK)
    assert caught.value.code == "E_TIMEOUT"
    assert 0.5 < time.monotonic() - start < 1.0 + 0.3 + 1.0  # the deadline, an attempt, and slack


def test_fault_19_a_drip_ends_at_the_deadline_too(
    web: WebServer, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drip(handler: Any) -> None:
        handler.start(
            206,
            {
                "Content-Range": f"bytes 100000-249999/{SIZE}",
                "ETag": web.etag(web.folder / FILE),
                "Content-Length": "150000",
            },
        )
        while not web.released.wait(0.05):
            handler.send(b"x")

    monkeypatch.setattr(patience, "MIN_RATE", 1 << 30)
    web.always = lambda noted: None if noted.headers["range"].startswith("bytes=0-") else drip
    start = time.monotonic()
    with pytest.raises(DownloadError) as caught:
        fetched(f"{web.url}/{FILE}", **QUICK)
    assert caught.value.code == "E_TIMEOUT"
    assert time.monotonic() - start < 3


@pytest.mark.parametrize("code", [429, 503])
def test_fault_20_a_busy_server_is_asked_again_when_it_says(
    web: WebServer, data: bytes, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    web.queue(status(code, Retry_After="1"), status(code), status(code), big=True)
    start = time.monotonic()
    assert fetched(f"{web.url}/{FILE}") == data[100_000:250_000]
    assert time.monotonic() - start > 1
    assert caplog.text.count(f"the server answered {code}") == 3
    assert "attempt 1 failed" in caplog.text
    assert "attempt 3 failed" in caplog.text


def test_fault_20_a_wait_past_the_deadline_is_not_waited_for(web: WebServer, data: bytes) -> None:
    web.always = lambda _: status(503, Retry_After="3600")
    start = time.monotonic()
    with pytest.raises(DownloadError, match="asks to wait 3600 s") as caught:
        fetched(f"{web.url}/{FILE}", **QUICK)
    assert caught.value.code == "E_TIMEOUT"
    assert time.monotonic() - start < 1


def test_a_server_that_always_fails_is_given_up(
    web: WebServer, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "FIRST_WAIT", 0.001)
    web.always = lambda _: status(500)
    with pytest.raises(DownloadError, match="failed 10 times") as caught:
        fetched(f"{web.url}/{FILE}")
    assert caught.value.code == "E_DOWNLOAD"
    assert len(web.requests) == patience.MAX_ATTEMPTS


@pytest.mark.parametrize("path", ["x.gguf", "a/folder"])
def test_a_server_that_is_not_there_is_offline_and_asked_for_one_file(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(patience, "FIRST_WAIT", 0.001)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with pytest.raises(DownloadError) as caught:
        loadkit.plan(f"http://127.0.0.1:{port}/{path}")
    assert caught.value.code == "E_OFFLINE"
    assert caught.value.exit_code == 3
    again = [record for record in caplog.records if "again in" in record.getMessage()]
    assert len(again) == patience.MAX_UNREACHED - 1


# -- digests -------------------------------------------------------------------------------------


def _with_digests(folder: Path) -> None:
    """Write a manifest that knows every tensor's SHA-256."""
    name = "model.safetensors"
    file = LocalFile(name, str(folder / name))
    entries = {
        info.name: TensorEntry(
            info.dtype,
            info.shape,
            info.offset,
            hashlib.sha256(file.read(info.offset, info.nbytes)).hexdigest(),
        )
        for info in read_header(file).tensors
    }
    entry = FileEntry(file.size, tensors=entries)
    file.close()
    (folder / MANIFEST).write_bytes(manifest_bytes(Manifest("checkpoint", {name: entry})))


def test_streamed_bytes_are_verified_where_digests_are_known(web: WebServer) -> None:
    write_llama(web.folder, hidden=64, ffn=512, vocab=2000)
    _with_digests(web.folder)
    uri = f"{web.url}/"
    config = LoadConfig(stream=True, verify="digest")
    report = loadkit.load(uri, load_config=config).report
    assert report.verified["compared_bytes"] >= report.bytes_needed
    file = web.folder / "model.safetensors"
    bad = bytearray(file.read_bytes())
    bad[-100] ^= 1
    file.write_bytes(bad)
    with pytest.raises(IntegrityError) as caught:
        loadkit.load(uri, load_config=config)
    assert caught.value.file == file.name
    assert caught.value.tensor is not None


def test_streamed_bytes_that_nobody_has_a_digest_of_are_named(web: WebServer) -> None:
    write_llama(web.folder)
    config = LoadConfig(stream=True, verify="digest")
    report = loadkit.load(f"{web.url}/", load_config=config).report
    assert any("not verified" in warning for warning in report.warnings)
    assert report.bytes_read == report.bytes_needed


def test_what_is_wrong_with_a_remote_checkpoint_is_in_its_plan(web: WebServer) -> None:
    write_llama(web.folder, shards=2)
    (web.folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises((PlanError, loadkit.LoadkitError), match="named and missing"):
        loadkit.plan(f"{web.url}/")
