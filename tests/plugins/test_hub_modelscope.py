"""``modelscope://`` through ModelScope's own client, against a small server of its API."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import torch

import loadkit
from helpers.checkpoints import write_llama
from loadkit.config import LoadConfig
from loadkit.errors import DownloadError, IntegrityError, LoadkitError, NotInstalledError, PathError

installed = importlib.util.find_spec("modelscope_hub") is not None
needs_client = pytest.mark.skipif(not installed, reason="modelscope-hub is not installed")


class Scope(ThreadingHTTPServer):
    """ModelScope's API over one folder, as ``org/toy`` at ``master``."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.asked: list[tuple[str, str | None, int]] = []  # file, range, bytes sent
        self.digests: dict[str, str] = {}
        self.names: dict[str, str] = {}
        self.status = 200
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_: object) -> None:
        """Clients that go away are nothing to print."""

    def listed(self) -> list[dict[str, Any]]:
        return [
            {
                "Path": self.names.get(path.name, path.name),
                "Name": path.name,
                "Type": "blob",
                "Size": path.stat().st_size,
                "Sha256": self.digests.get(
                    path.name, hashlib.sha256(path.read_bytes()).hexdigest()
                ),
            }
            for path in sorted(self.folder.iterdir())
        ]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Scope

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        if self.server.status != 200:
            body = json.dumps({"Code": self.server.status, "Message": "no", "Success": False})
            self._send(self.server.status, body.encode())
        elif not parts.path.startswith("/api/v1/models/org/toy"):
            self._send(404, b'{"Code": 10010205001, "Message": "not found", "Success": false}')
        elif parts.path.endswith("/repo/files"):
            data = {"Code": 200, "Success": True, "Data": {"Files": self.server.listed()}}
            self._send(200, json.dumps(data).encode())
        elif parts.path.endswith("/repo"):
            self._file(query["FilePath"])
        else:
            self._send(200, b'{"Code": 200, "Success": true, "Data": {}}')

    def _file(self, name: str) -> None:
        data = (self.server.folder / name).read_bytes()
        given = self.headers.get("Range")
        start, end, status, more = 0, len(data), 200, {}
        if given:
            low, _, high = given.removeprefix("bytes=").partition("-")
            start, end, status = int(low), int(high) + 1 if high else len(data), 206
            more = {"Content-Range": f"bytes {start}-{end - 1}/{len(data)}"}
        self.server.asked.append((name, given, end - start))
        self._send(status, data[start:end], {"ETag": '"v1"', "Accept-Ranges": "bytes", **more})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture
def scope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scope]:
    write_llama(tmp_path / "toy", shards=2)
    server = Scope(tmp_path / "toy")
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", server.url)
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MODELSCOPE_HOME", str(tmp_path / "scope-home"))
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "")
    monkeypatch.setenv("NO_PROXY", "*")
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_without_the_client_the_error_has_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "loadkit_hub.modelscope.find_spec",
        lambda name: None if name == "modelscope_hub" else real(name),
    )
    with pytest.raises(NotInstalledError, match=r'pip install "loadkit-hub\[modelscope\]"'):
        loadkit.plan("modelscope://org/toy")


@needs_client
def test_the_calls_fit_the_clients_signatures() -> None:
    from modelscope_hub import HubApi, HubConfig, errors

    listing = inspect.signature(HubApi.list_repo_files)
    listing.bind(None, "org/toy", "model", revision="master", recursive=True)
    fetching = inspect.signature(HubApi.download_file)
    fetching.bind(
        None,
        "org/toy",
        "model",
        "a.json",
        revision="master",
        cache_dir=Path("x"),
        expected_sha256=None,
        file_size=1,
    )
    assert {"endpoint", "token", "cache_dir"} <= set(inspect.signature(HubConfig).parameters)
    assert issubclass(errors.RequestTimeoutError, errors.NetworkError)


@needs_client
def test_a_plan_reads_ranges_and_a_load_is_what_the_folder_gives(
    scope: Scope, tmp_path: Path
) -> None:
    plan = loadkit.plan("modelscope://org/toy")
    assert plan.ok and all(given for _, given, _ in scope.asked)
    assert plan.bytes_fetched == sum(sent for _, _, sent in scope.asked)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    expected = loadkit.load_model(tmp_path / "toy").state_dict()
    for config in (LoadConfig(stream=True), LoadConfig(verify="digest")):
        found = loadkit.load_model("modelscope://org/toy", load_config=config).state_dict()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    scope.asked.clear()
    again = loadkit.load("modelscope://org/toy")
    assert scope.asked == [] and again.report.bytes_fetched == 0


@needs_client
def test_one_format_is_fetched(scope: Scope, tmp_path: Path) -> None:
    (scope.folder / "pytorch_model.bin").write_bytes(b"never")
    loadkit.load("modelscope://org/toy")
    assert "pytorch_model.bin" not in {name for name, _, _ in scope.asked}


@pytest.mark.slow  # the client tries an unreachable host for seconds
@needs_client
def test_without_modelscope_the_cache_is_enough_or_lists_what_is_missing(
    scope: Scope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loadkit.load("modelscope://org/toy")
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", "http://127.0.0.1:9")
    loadkit.load("modelscope://org/toy")
    shard = next((tmp_path / "cache").rglob("model-00002*.safetensors"))
    shard.unlink()
    with pytest.raises(DownloadError) as caught:
        loadkit.load("modelscope://org/toy")
    assert caught.value.code == "E_OFFLINE" and caught.value.detail["missing"] == [shard.name]


@needs_client
def test_other_bytes_than_are_listed_are_refused(scope: Scope) -> None:
    scope.digests["model-00001-of-00002.safetensors"] = "0" * 64
    with pytest.raises((IntegrityError, DownloadError)) as caught:
        loadkit.load("modelscope://org/toy")
    assert "model-00001" in str(caught.value)


@needs_client
def test_a_name_that_leads_out_of_the_repository_is_refused(scope: Scope) -> None:
    scope.names["config.json"] = "../config.json"
    with pytest.raises(PathError):
        loadkit.plan("modelscope://org/toy")


@needs_client
def test_what_is_not_there_or_refused_is_typed(
    scope: Scope, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LoadkitError):
        loadkit.plan("modelscope://org/nothing")
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "ms-secretsecret")
    scope.status = 403
    with pytest.raises(DownloadError) as caught:
        loadkit.plan("modelscope://org/toy")
    assert caught.value.code == "E_AUTH" and "ms-secretsecret" not in str(caught.value)
