"""``s3://``, ``gs://`` and ``az://`` against servers on loopback, and the faults of buckets."""

from __future__ import annotations

import json
import logging
import re
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import loadkit
from helpers.checkpoints import write_llama, write_sparse_llama
from helpers.clouds import azurite, gcs_emulator, moto_s3, upload, why_not
from helpers.web_server import WebServer, cut, lie, stall, status, touch_later
from loadkit.cli import main
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.errors import DownloadError, OptionError, PathError
from loadkit.network import patience
from loadkit.sources import open_source
from loadkit.testing.watching import landed_bytes
from loadkit_remote.source import MAX_LISTED

SERVERS: dict[str, Callable[[Path], Any]] = {
    "s3": lambda _: moto_s3(),
    "gs": gcs_emulator,
    "az": azurite,
}
SECRET = "wJalrXUtnFEMIsecretsecretEXAMPLEKEY"


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"]
    for name in (*names, "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(patience, "FIRST_WAIT", 0.01)


@pytest.fixture(scope="module", params=list(SERVERS))
def cloud(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, dict[str, str], Path]]:
    """A scheme, the variables that lead to its server, and the folder that is in its bucket."""
    scheme = request.param
    reason = why_not(scheme)
    if reason:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp(scheme)
    model = folder / "model"
    write_llama(model, shards=2, hidden=240, heads=6, kv_heads=3, ffn=480, vocab=3000)
    (model / "tokenizer.json").write_text("{}")
    with SERVERS[scheme](folder / "server") as variables:
        files = {f"models/llama/{path.name}": path for path in model.iterdir()}
        files["models/llama/a/b/c/deep.txt"] = model / "config.json"
        files["other.txt"] = model / "config.json"
        files["models/llama-other/x.txt"] = model / "config.json"
        upload(scheme, variables, "bucket", files)
        yield scheme, variables, model


@pytest.fixture
def there(
    cloud: tuple[str, dict[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> tuple[str, Path]:
    """The address of the folder in the bucket, and the folder itself."""
    scheme, variables, model = cloud
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return f"{scheme}://bucket/models/llama", model


def same_parameters(a: torch.nn.Module, b: torch.nn.Module) -> None:
    for (name, mine), (_, theirs) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def test_a_folder_is_listed_planned_and_streamed(there: tuple[str, Path]) -> None:
    uri, model = there
    with open_source(uri, LoadConfig(stream=True)) as source:
        assert [info.name for info in source.list()] == sorted(p.name for p in model.iterdir())
        assert {i.name: i.size for i in source.list()} == {
            p.name: p.stat().st_size for p in model.iterdir()
        }
    config = LoadConfig(stream=True)
    total = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    for rank in (0, 2):
        parallel = ParallelConfig(tp_size=3, tp_rank=rank)
        plan = loadkit.plan(uri, parallel=parallel, load_config=config)
        assert plan.ok
        assert 0 < plan.bytes_fetched < 300_000
        result = loadkit.load(uri, parallel=parallel, load_config=config)
        assert result.report.bytes_read == plan.bytes_to_read < total / 2
        assert result.report.bytes_fetched == plan.bytes_fetched + plan.bytes_to_read
        same_parameters(result.model, loadkit.load_model(model, parallel=parallel))


def test_a_folder_is_downloaded(there: tuple[str, Path], tmp_path: Path) -> None:
    uri, model = there
    config = LoadConfig(cache_dir=str(tmp_path))
    first = loadkit.load(uri, load_config=config)
    same_parameters(first.model, loadkit.load_model(model))
    for path in model.glob("*.safetensors"):
        (copy,) = tmp_path.glob(f"remote/*/{path.name}")
        assert copy.read_bytes() == path.read_bytes()
    again = loadkit.load(uri, load_config=config)
    if uri.startswith("gs"):  # this emulator has neither ETags nor times
        return
    assert again.report.bytes_fetched < first.report.bytes_fetched / 2


def test_one_object_is_a_source(there: tuple[str, Path]) -> None:
    uri, model = there
    name = "model-00001-of-00002.safetensors"
    with open_source(f"{uri}/{name}", LoadConfig(stream=True)) as source:
        names = [info.name for info in source.list()]
        assert names == ["config.json", name, "tokenizer.json"]
        file = source.open(name)
        data = (model / name).read_bytes()
        assert file.size == len(data)
        assert file.read(100, 200_000) == data[100:200_100]
        into = bytearray(300_000)
        file.read_into(1000, memoryview(into))
        assert into == data[1000:301_000]
    with pytest.raises(PathError, match="there is no"):
        loadkit.plan(f"{uri}/none.gguf")


def test_an_empty_folder_and_no_bucket(there: tuple[str, Path]) -> None:
    uri, _ = there
    scheme = uri.partition(":")[0]
    with pytest.raises(loadkit.LoadkitError) as caught:
        loadkit.plan(f"{scheme}://bucket/nothing/here")
    assert caught.value.exit_code == 1
    with pytest.raises(loadkit.LoadkitError) as caught:
        loadkit.plan(f"{scheme}://no-such-bucket/models")
    assert "''" not in str(caught.value) and caught.value.file is None
    assert caught.value.hint or caught.value.exit_code == 1
    for wrong in ("", "/x", "user:pw@bucket/x"):
        with pytest.raises(OptionError, match="names no bucket") as refused:
            loadkit.plan(f"{scheme}://{wrong}")
        assert "pw@" not in str(refused.value)


def test_the_command_line_plans_and_loads_a_rank(
    there: tuple[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    uri, _ = there
    assert main(["plan", uri, "--tp", "3"]) == 0
    assert "fetched over the network for this:" in capsys.readouterr().out
    arguments = ["--tp", "3", "--rank", "0", "--set", "stream=true", "--json"]
    assert main(["load", uri, *arguments]) == 0
    (report,) = json.loads(capsys.readouterr().out)["ranks"]
    assert report["reader"] == "range"
    assert report["bytes_read"] <= report["bytes_fetched"]
    assert report["bytes_fetched"] - report["bytes_read"] < 300_000


def test_a_store_that_cannot_be_made_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(OptionError, match=r"az://container cannot be opened: .*[Aa]ccount"):
        loadkit.plan("az://container/folder")


# -- a bucket that can be told to fail -----------------------------------------------------------


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    """A server that answers as S3 does; the bucket is ``b``."""
    (tmp_path / "web" / "b").mkdir(parents=True)
    with WebServer(tmp_path / "web") as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIASECRETKEYID")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        yield server


@pytest.fixture
def data(bucket: WebServer) -> bytes:
    found = torch.randint(0, 256, (300_000,), dtype=torch.uint8).numpy().tobytes()
    (bucket.folder / "b" / "x.safetensors").write_bytes(found)
    return found


def fetched(start: int = 100_000, nbytes: int = 150_000, **options: Any) -> bytes:
    with open_source("s3://b/x.safetensors", LoadConfig(stream=True, **options)) as source:
        return source.open("x.safetensors").read(start, nbytes)


def test_a_70B_plan_from_s3_fetches_less_than_a_ten_thousandth(
    bucket: WebServer, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = bucket.folder / "b" / "llama-70b"
    write_sparse_llama(folder, layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, files=30)
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert size > 130e9
    for rank in ("0", "7"):
        before = bucket.sent()
        arguments = ["plan", "s3://b/llama-70b", "--tp", "8", "--rank", rank, "--json"]
        assert main(arguments) == 0
        (found,) = json.loads(capsys.readouterr().out)["ranks"]
        assert found["bytes_to_read"] > size / 10
        sent = bucket.sent() - before
        assert 0 < found["bytes_fetched"] <= sent < size / 10_000


def test_W12_a_listing_of_ten_million_keys_ends(bucket: WebServer) -> None:
    bucket.endless = 10_000_000
    start = time.monotonic()
    with pytest.raises(PathError, match=f"more than {MAX_LISTED} files"):
        loadkit.plan("s3://b/")
    assert time.monotonic() - start < 10
    assert len(bucket.requests) < 20


def test_W09_an_object_that_changes_between_two_ranges(bucket: WebServer, data: bytes) -> None:
    with open_source("s3://b/x.safetensors", LoadConfig(stream=True)) as source:
        file = source.open("x.safetensors")
        assert file.read(100_000, 70_000) == data[100_000:170_000]
        (bucket.folder / "b" / "x.safetensors").write_bytes(bytes(300_000))
        touch_later(bucket.folder / "b" / "x.safetensors")
        with pytest.raises(DownloadError, match="changed while it was read") as caught:
            file.read(180_000, 70_000)
    assert caught.value.code == "E_DOWNLOAD"


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param({"Content_Range": "bytes 0-149999/300000"}, id="W07"),
        pytest.param({"Content_Range": None}, id="W07-none"),
        pytest.param({"ETag": '"other"'}, id="W09"),
        pytest.param({"Content_Encoding": "gzip"}, id="W05"),
    ],
)
def test_a_bucket_that_lies(
    bucket: WebServer, data: bytes, headers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "MAX_ATTEMPTS", 2)
    bucket.always = lambda noted: (
        lie(**headers) if noted.asked.get("range", "")[:10] == "bytes=1000" else None
    )
    with pytest.raises(DownloadError) as caught:
        fetched()
    assert caught.value.code == "E_DOWNLOAD"


def test_W03_a_bucket_that_sends_elsewhere_is_not_followed(
    bucket: WebServer, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    from helpers.web_server import redirect

    monkeypatch.setattr(patience, "MAX_ATTEMPTS", 2)
    bucket.always = lambda _: redirect("http://169.254.169.254/latest/meta-data")
    start = time.monotonic()
    with pytest.raises(DownloadError):
        fetched(network_timeout=1.0, network_deadline=5.0)
    assert time.monotonic() - start < 5


def test_fault_17_and_20_attempts_go_on_where_they_broke(
    bucket: WebServer, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    bucket.queue(status(503), cut(70_000), status(429), cut(0), name="x.safetensors", big=True)
    with open_source("s3://b/", LoadConfig(stream=True)) as source:
        source.list()
        assert source.open("x.safetensors").read(100_000, 150_000) == data[100_000:250_000]
    assert caplog.text.count("again in") == 4
    last = bucket.requests[-1].asked["range"]
    assert int(last[6:].partition("-")[0]) > 100_000


def test_fault_19_a_silent_bucket_ends_at_the_deadline(bucket: WebServer, data: bytes) -> None:
    bucket.always = lambda noted: stall() if "range" in noted.asked else None
    start = time.monotonic()
    with pytest.raises(DownloadError) as caught:
        fetched(nbytes=1000, network_timeout=0.3, network_deadline=1.0)
    assert caught.value.code == "E_TIMEOUT"
    assert time.monotonic() - start < 6


@pytest.mark.slow
def test_fault_23_a_slow_bucket_that_resets_is_bounded_and_whole(
    bucket: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 MB a second for each connection, broken off after each half of a megabyte."""
    state = write_llama(
        bucket.folder / "b" / "m", hidden=240, heads=6, kv_heads=3, ffn=480, vocab=1000
    )
    bucket.rate = 1e6
    bucket.always = lambda noted: cut(500_000) if noted.name == "model.safetensors" else None
    monkeypatch.setattr("loadkit.readers.range.REQUEST", 1 << 20)  # what the bar is told of
    start = time.monotonic()
    with landed_bytes() as told:
        result = loadkit.load("s3://b/m", load_config=LoadConfig(stream=True))
    assert time.monotonic() - start < 60
    assert sum(told) == result.report.bytes_read and len(told) > 4  # progress while it goes on
    assert torch.equal(result.model.get_parameter("model.norm.weight"), state["model.norm.weight"])


@pytest.mark.parametrize(
    ("code", "body"),
    [
        (403, b"<Error><Code>RequestTimeTooSkewed</Code></Error>"),
        (400, b"<Error><Code>ExpiredToken</Code></Error>"),
        (401, b""),
    ],
    ids=["clock", "expired", "denied"],
)
def test_fault_24_credentials_are_looked_for_once_more(
    bucket: WebServer,
    data: bytes,
    code: int,
    body: bytes,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)

    def old_key(noted: Any) -> Any:
        late = noted.asked.get("range", "").startswith("bytes=1")
        if late and "AKIANEWKEY" not in noted.asked["authorization"]:
            return lambda handler: handler.reply(code, body)
        return None

    bucket.always = old_key
    with open_source("s3://b/x.safetensors", LoadConfig(stream=True)) as source:
        file = source.open("x.safetensors")
        with pytest.raises(DownloadError) as caught:  # the same credentials again
            file.read(100_000, 150_000)
        error = caught.value
        assert error.code == "E_AUTH"
        assert "also with fresh credentials" in error.message
        asked = [each for each in bucket.requests if each.status == code]
        assert len(asked) == 2
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIANEWKEY")
        assert file.read(100_000, 150_000) == data[100_000:250_000]
    shown = "".join(traceback.format_exception(error)) + caplog.text + repr(error.to_dict())
    assert not re.search(f"{SECRET}|AKIASECRET|AKIANEW|Signature=", shown)


def test_a_listing_that_is_denied_or_broken(bucket: WebServer) -> None:
    write_llama(bucket.folder / "b" / "m")
    bucket.queue(status(500), status(503))
    assert loadkit.plan("s3://b/m").ok
    bucket.always = lambda _: status(403)
    with pytest.raises(DownloadError) as caught:
        loadkit.plan("s3://b/m")
    assert caught.value.code == "E_AUTH"
