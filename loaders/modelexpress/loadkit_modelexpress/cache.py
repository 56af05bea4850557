"""Where a server's files are kept: the hub's cache layout, written by the package's own classes."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadkit.errors import DownloadError, LoadkitError, PathError
from loadkit.file_checks import show_path
from loadkit.output_file import write_error
from loadkit.text import printable
from loadkit_modelexpress.library import library

if TYPE_CHECKING:
    from loadkit.sources.base import FileInfo
    from loadkit_modelexpress.server import ModelServer

__all__ = ["Snapshot"]

_POLL = 0.05  # seconds


class Snapshot:
    """One commit's folder in the cache. Nothing is made before something is written.

    Args:
        root: the cache's folder.
        model: the model's name.
        commit: checked.

    Raises:
        PathError: the model's name cannot be a folder's.
    """

    def __init__(self, root: Path, model: str, commit: str) -> None:
        self._package = library("model_snapshot")
        try:
            name = self._package.repo_dir_name(model)
        except ValueError as error:
            raise PathError(f"{printable(error, 200)}") from error
        self.root, self.model, self.commit = root, model, commit
        self.folder = root / name / "snapshots" / commit

    def has(self, info: FileInfo) -> bool:
        """Whether a file is there, whole as far as its size tells."""
        try:
            return bool((self.folder / info.name).stat().st_size == info.size)
        except OSError:
            return False

    def fetch(
        self,
        infos: Sequence[FileInfo],
        server: ModelServer,
        seconds: float,
        landed: Callable[[int], None],
        revision: str | None,
    ) -> None:
        """Have files in the folder, whichever process fetches them; each comes whole or not.

        Args:
            infos: the files.
            server: where from.
            seconds: how long another process may keep this one waiting without a new file.
            landed: told bytes as they come; less than nothing where they come again.
            revision: what was asked for: it will be found under that name too.

        Raises:
            WriteError: there is no room, or no right to write.
            PathError: the cache's folder leads elsewhere.
            LoadkitError: the server, as of ``ModelServer.whole``.
        """
        try:
            cache = self._package.ModelSnapshotCache(self.model, self.root)
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = cache.repo_root / getattr(self._package, "_LOCK_FILE", ".modelexpress.lock")
            with _locked(lock, seconds, lambda: sum(map(self.has, infos))):
                for info in infos:
                    if self.has(info):
                        landed(info.size)
                    else:
                        self._fetch(cache, info, server, landed)
                cache.write_revision_ref(self.commit, revision)
        except LoadkitError:
            raise
        except OSError as error:
            found = write_error(error, str(self.root), "write to the cache")
            found.hint = "make room, or name another folder: cache_dir=..."
            raise found from error
        except self._package.ModelSnapshotError as error:
            raise PathError(
                f"the cache {show_path(self.root)} cannot be used: {printable(error, 300)}",
                hint="name another folder: cache_dir=...",
            ) from error

    def _fetch(
        self, cache: Any, info: FileInfo, server: ModelServer, landed: Callable[[int], None]
    ) -> None:
        """One file, by the package's patch of a snapshot: a rename puts it there."""
        patch = cache.patch(self.folder)
        came = 0

        def restart() -> None:
            nonlocal came
            patch.close()
            patch.begin_file(info.name)
            landed(-came)
            came = 0

        def take(data: bytes) -> None:
            nonlocal came
            patch.write(data)
            landed(len(data))
            came += len(data)

        try:
            server.whole(info, take, restart)
            patch.end_file()
            patch.commit()
        except BaseException:
            patch.rollback()
            raise
        finally:
            patch.close()


@contextmanager
def _locked(path: Path, seconds: float, moves: Callable[[], object]) -> Iterator[None]:
    """Hold the lock that the package's own clients look at too.

    Raises:
        DownloadError: E_TIMEOUT, its holder stands still.
        OSError: there are no locks there.
    """
    number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        seen, until = moves(), time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pass
            now = time.monotonic()
            if (current := moves()) != seen:
                seen, until = current, now + seconds
            if now >= until:
                raise DownloadError(
                    f"another process holds {show_path(path)} and no file has come for "
                    f"{seconds:g} s",
                    code="E_TIMEOUT",
                    detail={"lock": str(path)},
                    hint="end that process, or raise LoadConfig.network_deadline",
                )
            time.sleep(_POLL)
        yield
    finally:
        os.close(number)  # and the lock with it
