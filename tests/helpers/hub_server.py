"""A small server on loopback that speaks the hub's API over a folder, and can misbehave.

Two ports: the hub, and the host of large files that it redirects to. A file is in large file
storage where its name says so or it is larger than ``LARGE`` bytes, as on the hub itself.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

__all__ = ["TOKEN", "Hub", "Request", "ask_hub", "hub_server"]

LARGE = 4096  # bytes
LFS_NAMES = (".safetensors", ".bin", ".gguf", ".pth", ".pt")
TOKEN = "hf_secretsecretsecretsecretsecretsecret"
CHUNK = 64 << 10


@dataclass
class Request:
    """One request as it came in. ``where``: ``hub`` or ``cdn``."""

    where: str
    method: str
    path: str
    headers: dict[str, str]
    sent: int = 0


@dataclass
class Hub:
    """The server's state; tests set what goes wrong and look at what was asked.

    Attributes:
        repos: ``org/name`` -> folder.
        answer: asked before every answer, ``(request, file name or "") -> action``: an action is
            None, ``("status", code, headers)``, ``("cut", bytes)``, ``("stall", seconds)``,
            ``("headers", {...})`` (in place of the right ones; None removes one) or
            ``("body", bytes)``.
        oids: digests that the listing tells in place of the right ones.
        gated: repositories that need TOKEN.
        page: files of one page of a listing.
    """

    repos: dict[str, Path] = field(default_factory=dict)
    answer: Callable[[Request, str], tuple[Any, ...] | None] = lambda request, name: None
    oids: dict[str, str] = field(default_factory=dict)
    commits: dict[str, str] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    page: int = 1000
    signature: str = "SIGNED"
    requests: list[Request] = field(default_factory=list)
    url: str = ""
    cdn: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)
    digests: dict[Path, str] = field(default_factory=dict)

    def commit(self, repo: str) -> str:
        """What ``main`` is at."""
        made = hashlib.sha1(repo.encode()).hexdigest()
        return self.commits.get(repo, made)

    def files(self, repo: str) -> list[str]:
        """Every file's name."""
        folder = self.repos[repo]
        return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())

    def is_large(self, path: Path) -> bool:
        return path.name.endswith(LFS_NAMES) or path.stat().st_size > LARGE

    def git_oid(self, path: Path) -> str:
        if self.is_large(path):
            return hashlib.sha1(path.name.encode()).hexdigest()  # of a pointer: any will do
        data = path.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    def sha256(self, path: Path) -> str:
        """A digest; of a file of gigabytes (a sparse one) one that nobody checks."""
        if path not in self.digests:
            large = path.stat().st_size > 1 << 28
            data = path.name.encode() if large else path.read_bytes()
            self.digests[path] = hashlib.sha256(data).hexdigest()
        return self.digests[path]

    def oid(self, path: Path) -> str:
        """What the content is called: the ETag."""
        found = self.sha256(path) if self.is_large(path) else self.git_oid(path)
        return self.oids.get(path.name, found)

    def listed(self, repo: str) -> list[dict[str, Any]]:
        """The listing of a commit."""
        folder, items = self.repos[repo], []
        for name in self.files(repo):
            path = folder / name
            item: dict[str, Any] = {
                "type": "file",
                "path": name,
                "size": path.stat().st_size,
                "oid": self.git_oid(path),
            }
            if self.is_large(path):
                item["lfs"] = {"oid": self.oid(path), "size": item["size"], "pointerSize": 134}
            items.append(item)
        return items

    def count(self, method: str = "GET", where: str = "", path: str = "") -> int:
        """Requests of a kind."""
        return len(
            [r for r in self.requests if r.method == method and where in r.where and path in r.path]
        )

    def bytes_of(self, name: str) -> int:
        """Bytes that were sent of a file."""
        return sum(request.sent for request in self.requests if request.path.endswith(name))

    def fetched(self) -> Counter[str]:
        """Whole-file requests by name: those that began at byte 0 and were sent to the end."""
        found: Counter[str] = Counter()
        for request in self.requests:
            if request.method == "GET" and request.sent and "/api/" not in request.path:
                found[request.path.rpartition("/")[2]] += 1
        return found


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub
    where: str

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._go()

    def do_HEAD(self) -> None:
        self._go()

    def _go(self) -> None:
        parts = urlsplit(self.path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.where, self.command, unquote(parts.path), headers)
        with self.hub.lock:
            self.hub.requests.append(request)
        try:
            self._answer(request, parse_qs(parts.query))
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _answer(self, request: Request, query: dict[str, list[str]]) -> None:
        path = request.path.strip("/")
        name = ""
        if "/resolve/" in f"/{path}/":
            name = path.split("/resolve/", 1)[1].partition("/")[2]
        action = self.hub.answer(request, name)
        if action and action[0] == "status":
            self._plain(action[1], b"no", action[2] if len(action) > 2 else {})
            return
        if action and action[0] == "stall":
            time.sleep(action[1])
            action = None
        if action and action[0] == "body":
            self._plain(200, action[1], action[2] if len(action) > 2 else {})
            return
        if path.startswith("api/models/"):
            self._api(request, path.removeprefix("api/models/"), query)
        elif name:
            repo, _, rest = path.partition("/resolve/")
            self._file(request, repo, rest.partition("/")[0], name, action, query)
        else:
            self._plain(404, b"nothing here")

    def _plain(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        if "Content-Length" not in (headers or {}):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refused(self, request: Request, repo: str) -> bool:
        authorized = request.headers.get("authorization") == f"Bearer {TOKEN}"
        if repo not in self.hub.repos:
            headers = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
            self._plain(401 if not authorized else 404, b"{}", headers)
            return True
        if repo in self.hub.gated and not authorized:
            told = request.headers.get("authorization", "")
            headers = {"X-Error-Code": "GatedRepo", "X-Error-Message": f"gated for {told}"}
            self._plain(403 if told else 401, b"{}", headers)
            return True
        return False

    def _api(self, request: Request, path: str, query: dict[str, list[str]]) -> None:
        parts = path.split("/")
        repo, kind, revision = "/".join(parts[:2]), parts[2], "/".join(parts[3:])
        if self._refused(request, repo):
            return
        commit = self.hub.commit(repo)
        if revision not in ("main", commit):
            self._plain(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        if kind == "revision":
            self._plain(200, json.dumps({"id": repo, "sha": commit}).encode())
            return
        start = int(query.get("cursor", ["0"])[0])
        items = self.hub.listed(repo)
        page = items[start : start + self.hub.page] if isinstance(items, list) else items
        headers = {}
        if start + self.hub.page < len(items):
            after = f"{self.hub.url}{request.path}?recursive=true&cursor={start + self.hub.page}"
            headers["Link"] = f'<{after}>; rel="next"'
        self._plain(200, json.dumps(page).encode(), headers)

    def _file(
        self,
        request: Request,
        repo: str,
        revision: str,
        name: str,
        action: tuple[Any, ...] | None,
        query: dict[str, list[str]],
    ) -> None:
        if request.where == "cdn":
            if query.get("signature") != [self.hub.signature]:
                self._plain(403, b"expired")
                return
        elif self._refused(request, repo):
            return
        path = self.hub.repos[repo] / name
        if not path.is_file():
            self._plain(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        oid = self.hub.oid(path)
        headers: dict[str, str | None] = {"Accept-Ranges": "bytes"}
        if request.where == "hub":
            headers["X-Repo-Commit"] = self.hub.commit(repo)
            headers["ETag"] = f'"{oid}"'
        if request.where == "hub" and self.hub.is_large(path):
            headers["X-Linked-Etag"] = f'"{oid}"'
            headers["X-Linked-Size"] = str(path.stat().st_size)
            headers["Location"] = (
                f"{self.hub.cdn}/{repo}/resolve/{revision}/{name}?signature={self.hub.signature}"
            )
            if action and action[0] == "headers":
                headers |= action[1]
            self._plain(302, b"", {key: value for key, value in headers.items() if value})
            return
        if request.where == "cdn":
            headers["ETag"] = f'"cdn-{oid[:12]}"'
        if action and action[0] == "headers":
            headers |= action[1]
        self._ranges(request, path, headers, action)

    def _ranges(
        self,
        request: Request,
        path: Path,
        headers: dict[str, str | None],
        action: tuple[Any, ...] | None,
    ) -> None:
        size = path.stat().st_size
        start, end, status = 0, size, 200
        given = request.headers.get("range", "")
        etag = headers.get("ETag") or ""
        if request.headers.get("if-match") not in (None, etag):
            self._plain(412, b"")
            return
        if given.startswith("bytes=") and size:
            low, _, high = given.removeprefix("bytes=").partition("-")
            start, end, status = int(low), min(int(high) + 1 if high else size, size), 206
            headers.setdefault("Content-Range", f"bytes {start}-{end - 1}/{size}")
        self.send_response(status)
        headers.setdefault("Content-Length", str(end - start))
        for key, value in headers.items():
            if value is not None:
                self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        left = end - start
        if action and action[0] == "cut":
            left = min(left, action[1])
            self.close_connection = True
        with path.open("rb") as file:
            file.seek(start)
            while left:
                data = file.read(min(CHUNK, left))
                self.wfile.write(data)
                left -= len(data)
                with self.hub.lock:
                    request.sent += len(data)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Clients that go away are nothing to print."""


def ask_hub(hub: Hub, home: Path, monkeypatch: Any, *, token: str = "") -> None:
    """Set the environment so that the hub is this server, and its cache is in ``home``."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setenv("NO_PROXY", "*")
    if token:
        monkeypatch.setenv("HF_TOKEN", token)


@contextmanager
def hub_server(**repos: Path) -> Iterator[Hub]:
    """The server, running until the end of the block.

    Args:
        repos: folders by name; ``org__name`` is the repository ``org/name``.
    """
    hub = Hub({name.replace("__", "/"): folder for name, folder in repos.items()})
    servers = []
    for where in ("hub", "cdn"):
        handler = type("Handler", (_Handler,), {"hub": hub, "where": where})
        server = _Server(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        servers.append((server, thread))
    hub.url = f"http://127.0.0.1:{servers[0][0].server_address[1]}"
    hub.cdn = f"http://localhost:{servers[1][0].server_address[1]}"
    try:
        yield hub
    finally:
        for server, thread in servers:
            server.shutdown()
            server.server_close()
            thread.join()
