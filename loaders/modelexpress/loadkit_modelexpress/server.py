"""A ModelExpress server's files, through the package's own client.

The client gives channel, credentials and messages. Its own loops are not used: they have no
deadline and no second attempt, and their errors say neither file nor byte.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from loadkit.errors import ChangedError, DownloadError, LoadkitError, PathError
from loadkit.file_checks import show
from loadkit.sources.base import FileInfo
from loadkit.sources.paths import check_name
from loadkit.text import printable
from loadkit_modelexpress.calls import Deadline, again, status_of, typed, watched
from loadkit_modelexpress.library import library

if TYPE_CHECKING:
    from loadkit.config import LoadConfig
    from loadkit_modelexpress.settings import Settings

__all__ = ["MAX_LISTED", "ModelServer"]

logger = logging.getLogger(__name__)

MAX_LISTED = 10_000  # files; a checkpoint has a few hundred
MAX_COMMIT = 128  # characters


class ModelServer:
    """One model of a server. Nothing is asked before a method is called.

    Args:
        settings: server, model and how it is asked.
        load_config: ``network_timeout`` and ``network_deadline`` count.

    Raises:
        NotInstalledError: the package is missing.
    """

    def __init__(self, settings: Settings, load_config: LoadConfig) -> None:
        self.settings = settings
        self.model, self.server = settings.model, settings.server
        self.commit: str | None = None
        self._load_config = load_config
        self._client = library("model_client").ModelCacheClient(
            server_url=settings.server, chunk_size=settings.chunk_size
        )
        self._messages = library("model_pb2")
        self._provider = getattr(self._messages, settings.provider.upper())

    def close(self) -> None:
        """Close the connection; may be called twice."""
        self._client.close()

    def deadline(self, what: str) -> Deadline:
        """Of one transfer."""
        return Deadline(self._load_config, what)

    # -- which commit, which files -----------------------------------------------------------------

    def ensure(self, revision: str | None) -> str | None:
        """Have the server fetch the model, if it lacks it; the commit, where it says one.

        Raises:
            PathError: it knows no such model or revision.
            DownloadError: it failed, or is not reached; E_TIMEOUT: ``download_timeout`` passed.
        """
        import grpc

        deadline = self.deadline(f"the server's download of {show(self.model)}")
        request = self._messages.ModelDownloadRequest(
            model_name=self.model, provider=self._provider, ignore_weights=False
        )
        if revision is not None:
            request.revision = revision

        def ask() -> Any:
            seconds = self.settings.download_timeout
            try:
                for update in self._client.stub.EnsureModelDownloaded(request, timeout=seconds):
                    said = printable(update.message or update.status, 200)
                    logger.info("%s: %s", self.model, said)
                    if update.status != self._messages.DOWNLOADING:
                        return update
            except grpc.RpcError as error:
                if status_of(error) != "DEADLINE_EXCEEDED":
                    raise
                raise self._too_slow() from error
            return None

        update = again(ask, deadline, self.server, self.model)
        if update is None or update.status != self._messages.DOWNLOADED:
            said = "ended without a word" if update is None else printable(update.message, 200)
            raise DownloadError(
                f"the ModelExpress server {self.server} could not fetch {show(self.model)}: {said}",
                detail={"server": self.server, "model": self.model, "revision": revision},
                hint="the server's log says more; it needs a way to the hub, and for gated models "
                "a token of its own",
            )
        commit = update.resolved_revision if update.HasField("resolved_revision") else None
        if revision is not None:
            self._check_pin(revision, commit)
        return None if commit is None else self._checked_commit(commit)

    def _too_slow(self) -> DownloadError:
        seconds = self.settings.download_timeout
        return DownloadError(
            f"the ModelExpress server {self.server} did not have {show(self.model)} within "
            f"{seconds:g} s",
            code="E_TIMEOUT",
            detail={"server": self.server, "model": self.model, "download_timeout": seconds},
            hint="load again, for the server may go on with its download; or raise the option "
            "download_timeout",
        )

    def _check_pin(self, revision: str, commit: str | None) -> None:
        """A server that ignores the revision is no server of it."""
        is_commit = len(revision) == 40 and set(revision.lower()) <= set("0123456789abcdef")
        if commit is None or (is_commit and commit.lower() != revision.lower()):
            named = "does not say which commit" if commit is None else f"says {show(commit)}"
            raise DownloadError(
                f"revision {show(revision)} of {show(self.model)} was asked for, and the "
                f"ModelExpress server {self.server} {named}",
                detail={"server": self.server, "model": self.model, "revision": revision},
                hint="it may be older than pinned revisions; without one it gives its own",
            )

    def _checked_commit(self, commit: str) -> str:
        """A commit as it becomes a folder's name.

        Raises:
            PathError: it cannot.
        """
        try:
            library("model_snapshot").safe_commit_hash(commit)
            check_name(commit)
        except (RuntimeError, PathError) as error:
            raise PathError(
                f"the ModelExpress server {self.server} names the commit {show(commit)}, which is "
                "no name of a folder"
            ) from error
        if len(commit) > MAX_COMMIT or not commit.isprintable():
            raise PathError(f"the ModelExpress server {self.server} names a commit that is none")
        return commit

    def files(self, revision: str | None) -> list[FileInfo]:
        """What the model has.

        Raises:
            PathError: it knows no such model; a name leads out of the folder.
            DownloadError: it failed, or its list contradicts itself.
        """
        deadline = self.deadline(f"the list of files of {show(self.model)}")
        request = self._messages.ModelFilesRequest(model_name=self.model, provider=self._provider)
        if revision is not None:
            request.revision = revision

        def ask() -> Any:
            return self._client.stub.ListModelFiles(request, timeout=max(0.05, deadline.left()))

        answer = again(ask, deadline, self.server, self.model)
        found = [FileInfo(check_name(one.relative_path), one.size) for one in answer.files]
        problem = ""
        if not found:
            problem = "is empty"
        elif len(found) > MAX_LISTED:
            problem = f"has more than {MAX_LISTED} files"
        elif len({info.name for info in found}) < len(found):
            problem = "names a file twice"
        elif sum(info.size for info in found) != answer.total_size:
            problem = (
                f"says {answer.total_size} bytes in all and lists "
                f"{sum(info.size for info in found)}"
            )
        if problem:
            raise DownloadError(
                f"the list of files of {show(self.model)} that the ModelExpress server "
                f"{self.server} sends {problem}",
                detail={"server": self.server, "model": self.model},
                hint="the server is at fault",
            )
        return found

    # -- bytes -------------------------------------------------------------------------------------

    def stream(self, info: FileInfo, deadline: Deadline, chunk: int = 0) -> Iterator[bytes]:
        """A file's bytes from its begin to its end, each piece checked against the list.

        The first piece of all says the commit where it is not known; all later ones are of it.

        Args:
            info: the file.
            deadline: moved on by what arrives.
            chunk: bytes of a piece; 0: the option's.

        Raises:
            ChangedError: the server has moved on to another commit.
            DownloadError: the pieces do not make up the file.
            grpc.RpcError: the call failed.
        """
        request = self._messages.ModelFilesRequest(
            model_name=self.model,
            provider=self._provider,
            chunk_size=chunk or self.settings.chunk_size,
            file_selector=self._messages.ModelFileSelector(paths=[info.name]),
        )
        if self.commit is not None:
            request.revision = self.commit
        at, first, done = 0, True, False
        for piece in watched(self._client.stub.StreamModelFiles(request), deadline):
            if first:
                self._take_commit(piece, info)
                first = False
            elif piece.HasField("commit_hash") and piece.commit_hash != self.commit:
                raise self._moved(piece.commit_hash, info)
            problem = _problem(piece, info, at, done=done)
            if problem:
                raise DownloadError(
                    f"{show(info.name)} at byte {at}: the ModelExpress server {self.server} "
                    f"{problem}",
                    file=info.name,
                    offset=at,
                    detail={"server": self.server, "model": self.model},
                    hint="the server, or a proxy before it, is at fault; nothing of the file was "
                    "kept",
                )
            at += len(piece.data)
            done = piece.is_last_chunk
            deadline.arrived(len(piece.data))
            yield piece.data
        if not done:
            raise Cut(at)

    def _take_commit(self, piece: Any, info: FileInfo) -> None:
        said = piece.commit_hash if piece.HasField("commit_hash") else None
        if said is None:
            raise DownloadError(
                f"{show(info.name)}: the ModelExpress server {self.server} does not say of which "
                "commit it is",
                file=info.name,
                hint="the server is older than the package modelexpress here",
            )
        if self.commit is None:
            self.commit = self._checked_commit(said)
        elif said != self.commit:
            raise self._moved(said, info)

    def _moved(self, said: str, info: FileInfo) -> ChangedError:
        return ChangedError(
            f"{show(info.name)} comes from commit {show(said)}; the load began with commit "
            f"{self.commit}",
            file=info.name,
            detail={"server": self.server, "found": printable(said, 80), "expected": self.commit},
            hint="load again, or name the revision",
        )

    def whole(
        self, info: FileInfo, take: Callable[[bytes], object], restart: Callable[[], object]
    ) -> None:
        """A file's bytes, begun again where the way broke off: the protocol has no ranges.

        Args:
            info: the file.
            take: gets the pieces in order.
            restart: called before pieces come from the begin again.

        Raises:
            LoadkitError: as ``stream``, and as ``typed``.
        """
        import grpc

        deadline = self.deadline(f"{show(info.name)} of {show(self.model)}")
        while True:
            deadline.begin()
            restart()
            found: LoadkitError
            try:
                for piece in self.stream(info, deadline):
                    take(piece)
                return
            except Cut as cut:
                found = self.ended(info, cut.at)
                passes = True
            except grpc.RpcError as error:
                found = typed(error, deadline, self.server, f"{self.model}: {info.name}")
                found.file, found.__cause__ = info.name, error
                passes = bool(isinstance(found.detail, dict) and found.detail.get("unreached"))
            if not passes or not deadline.pause():
                raise found
            logger.info("%s; attempt %d", found.message, deadline.attempts + 1)

    def start(self, info: FileInfo, nbytes: int, chunk: int) -> bytes:
        """A file's first bytes, ``nbytes`` of them at least unless it is shorter.

        Raises:
            LoadkitError: as ``whole``.
        """
        import grpc

        deadline = self.deadline(f"the begin of {show(info.name)} of {show(self.model)}")

        def ask() -> bytes:
            pieces, at = [], 0
            stream = self.stream(info, deadline, chunk)
            try:
                for piece in stream:
                    pieces.append(piece)
                    at += len(piece)
                    if at >= nbytes:
                        break
            except Cut as cut:
                raise self.ended(info, cut.at) from None
            finally:
                stream.close()  # type: ignore[attr-defined]  # a generator: ends the call
            return b"".join(pieces)

        try:
            return again(ask, deadline, self.server, self.model)
        except grpc.RpcError as error:  # what ``again`` does not type
            raise typed(error, deadline, self.server, self.model) from error

    def ended(self, info: FileInfo, at: int) -> DownloadError:
        """The error of a stream that ended early."""
        return DownloadError(
            f"{show(info.name)} broke off at byte {at} of {info.size}: the ModelExpress server "
            f"{self.server} ended the stream",
            file=info.name,
            offset=at,
            detail={"server": self.server, "model": self.model, "size": info.size},
            hint="load again; files that came whole are kept",
        )


class Cut(Exception):  # noqa: N818
    """A stream ended before its file did."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at = at


def _problem(piece: Any, info: FileInfo, at: int, *, done: bool) -> str:
    """What is wrong with the next piece of a file; "" for nothing."""
    end = at + len(piece.data)
    if done:
        return "sends more after the last piece"
    if piece.relative_path != info.name:
        return f"sends a piece of {show(piece.relative_path)}, which was not asked for"
    if piece.total_size != info.size:
        return f"says now that it has {piece.total_size} bytes; its list says {info.size}"
    if piece.offset != at:
        return f"sends a piece of byte {piece.offset}"
    if end > info.size:
        return f"sends {end} bytes; its list says {info.size}"
    if piece.is_last_chunk and end != info.size:
        return f"calls byte {end} of {info.size} the end"
    if piece.is_last_file and not piece.is_last_chunk:
        return "ends all files within one"
    if end == info.size and not piece.is_last_chunk:
        return "does not mark the end"
    return ""
