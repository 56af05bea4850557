"""A small ModelExpress server on loopback, made of the package's own stubs, that can misbehave.

It serves folders as models, and keeps what replicas publish.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from modelexpress import model_pb2, model_pb2_grpc, p2p_pb2, p2p_pb2_grpc
from modelexpress.metadata.source_id import compute_mx_source_id

__all__ = ["COMMIT", "Hub", "model_express"]

COMMIT = "0123456789abcdef0123456789abcdef01234567"
Status = grpc.StatusCode


@dataclass
class Hub:
    """The server's state; tests set what goes wrong and look at what was asked.

    Attributes:
        models: name -> folder.
        commit: what every model is at.
        names_commit: whether ``EnsureModelDownloaded`` says it.
        fails: call -> statuses that its next calls end with.
        chunks: changes the pieces of a file: ``(name, pieces) -> pieces``.
        listing: changes a list of files.
        stall: set where a stream stands still for ever; released at the end.
        asked: how often each call came; ``streamed``: the same by file.
        sent: bytes of files that were sent, by file.
        workers: what replicas published: (source id, worker id) -> (identity, metadata, status).
    """

    models: dict[str, Path] = field(default_factory=dict)
    commit: str = COMMIT
    names_commit: bool = True
    fails: dict[str, list[Any]] = field(default_factory=dict)
    chunks: Callable[[str, Iterator[Any]], Iterator[Any]] = lambda name, pieces: pieces
    listing: Callable[[Any], Any] = lambda answer: answer
    ensure: Callable[[Any], Iterator[Any]] | None = None
    asked: Counter[str] = field(default_factory=Counter)
    streamed: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    workers: dict[tuple[str, str], list[Any]] = field(default_factory=dict)
    tokens: list[str] = field(default_factory=list)
    address: str = ""
    ended: threading.Event = field(default_factory=threading.Event)

    def begin(self, call: str, context: Any) -> None:
        self.asked[call] += 1
        self.tokens += [value for key, value in context.invocation_metadata() if "auth" in key]
        if self.fails.get(call):
            context.abort(self.fails[call].pop(0), f"{call} was told to fail")

    def folder(self, name: str, context: Any) -> Path:
        if name not in self.models:
            context.abort(Status.NOT_FOUND, f"no model {name}")
        return self.models[name]


class _Models(model_pb2_grpc.ModelServiceServicer):
    def __init__(self, hub: Hub) -> None:
        self.hub = hub

    def EnsureModelDownloaded(self, request: Any, context: Any) -> Iterator[Any]:
        self.hub.begin("ensure", context)
        self.hub.folder(request.model_name, context)
        if self.hub.ensure is not None:
            yield from self.hub.ensure(request)
            return
        yield model_pb2.ModelStatusUpdate(
            model_name=request.model_name, status=model_pb2.DOWNLOADING, message="on its way"
        )
        done = model_pb2.ModelStatusUpdate(
            model_name=request.model_name, status=model_pb2.DOWNLOADED
        )
        if self.hub.names_commit:
            done.resolved_revision = self.hub.commit
        yield done

    def ListModelFiles(self, request: Any, context: Any) -> Any:
        self.hub.begin("list", context)
        folder = self.hub.folder(request.model_name, context)
        answer = model_pb2.ModelFileList(model_name=request.model_name)
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                answer.files.add(
                    relative_path=str(path.relative_to(folder)), size=path.stat().st_size
                )
        answer.total_size = sum(one.size for one in answer.files)
        return self.hub.listing(answer)

    def StreamModelFiles(self, request: Any, context: Any) -> Iterator[Any]:
        self.hub.begin("stream", context)
        folder = self.hub.folder(request.model_name, context)
        names = list(request.file_selector.paths)
        for name in names:
            self.hub.streamed[name] += 1
            pieces = self._pieces(folder / name, name, request, last=name == names[-1])
            for piece in self.hub.chunks(name, pieces):
                if not context.is_active():
                    return
                self.hub.sent[name] += len(piece.data)
                yield piece

    def _pieces(self, path: Path, name: str, request: Any, *, last: bool) -> Iterator[Any]:
        size, step = path.stat().st_size, request.chunk_size or 32 << 10
        with path.open("rb") as file:
            for at in range(0, max(size, 1), step):
                part = file.read(step)
                end = at + len(part) == size
                piece = model_pb2.FileChunk(
                    relative_path=name, data=part, offset=at, total_size=size,
                    is_last_chunk=end, is_last_file=end and last,
                )  # fmt: skip
                if at == 0:
                    piece.commit_hash = self.hub.commit
                yield piece


class _Replicas(p2p_pb2_grpc.P2pServiceServicer):
    def __init__(self, hub: Hub) -> None:
        self.hub = hub

    def PublishMetadata(self, request: Any, context: Any) -> Any:
        self.hub.begin("publish", context)
        source = compute_mx_source_id(request.identity)
        self.hub.workers[source, request.worker_id] = [request.identity, request.worker, 0]
        return p2p_pb2.PublishMetadataResponse(
            success=True, mx_source_id=source, worker_id=request.worker_id
        )

    def UpdateStatus(self, request: Any, context: Any) -> Any:
        self.hub.begin("status", context)
        found = self.hub.workers.get((request.mx_source_id, request.worker_id))
        if found is not None:
            found[2] = request.status
        return p2p_pb2.UpdateStatusResponse(success=found is not None)

    def ListSources(self, request: Any, context: Any) -> Any:
        self.hub.begin("sources", context)
        wanted = compute_mx_source_id(request.identity)
        answer = p2p_pb2.ListSourcesResponse()
        for (source, worker_id), (_, worker, status) in self.hub.workers.items():
            if source == wanted and status == request.status_filter:
                answer.instances.add(
                    mx_source_id=source, worker_id=worker_id, worker_rank=worker.worker_rank,
                    accelerator=worker.accelerator,
                )  # fmt: skip
        return self.hub.listing(answer)

    def GetMetadata(self, request: Any, context: Any) -> Any:
        self.hub.begin("metadata", context)
        found = self.hub.workers.get((request.mx_source_id, request.worker_id))
        answer = p2p_pb2.GetMetadataResponse(found=found is not None)
        if found is not None:
            answer.worker.CopyFrom(found[1])
        return answer


@contextmanager
def model_express() -> Iterator[Hub]:
    """A running server; its address is ``hub.address``."""
    hub = Hub()
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=8))
    model_pb2_grpc.add_ModelServiceServicer_to_server(_Models(hub), server)
    p2p_pb2_grpc.add_P2pServiceServicer_to_server(_Replicas(hub), server)
    hub.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield hub
    finally:
        hub.ended.set()
        server.stop(0).wait(5)
