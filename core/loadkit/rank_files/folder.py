"""The folder that the ranks of one save fill together, and its one step into place."""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from loadkit.atomic_folder import AtomicFolder, digest_of
from loadkit.errors import UsageError
from loadkit.file_checks import show_path
from loadkit.folder_swap import CANNOT, fsync_folder
from loadkit.output_file import write_error
from loadkit.rank_files.unfinished import UNFINISHED

__all__ = ["RankFolder"]


class RankFolder(AtomicFolder):
    """``AtomicFolder`` for several writers: each leaves its files, one of them puts all in place.

    The files lie in ``path/loadkit-unfinished-<save id>`` until ``commit``. After an error a
    rank's own files are gone, the others' stay.

    Args:
        path: the folder.
        save_id: the same for all ranks of one save, another for another.
        stale: as ``AtomicFolder``'s.
    """

    def __init__(
        self, path: str | os.PathLike[str], save_id: str, stale: Callable[[str], bool]
    ) -> None:
        own = f"{UNFINISHED}{save_id}"
        super().__init__(
            path, lambda name: (name.startswith(UNFINISHED) and name != own) or stale(name)
        )
        self._own = own

    def _begin(self) -> None:
        self._make_parents()
        if not self.path.exists():
            self.path.mkdir(exist_ok=True)
            self._made.append(self.path)
        staging = self.path / self._own
        staging.mkdir(exist_ok=True)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        self._lock = os.open(staging, flags)
        self._staging = staging  # now it may be removed

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            for name in reversed(self.names):  # what says that they are whole goes first
                with suppress(OSError):
                    (self._staging / name).unlink()
        with suppress(OSError):
            self._staging.rmdir()  # if nothing is in it
        os.close(self._lock)
        self._lock = -1
        for folder in reversed(self._made if kind is not None else ()):
            with suppress(OSError):
                folder.rmdir()

    def listed(self) -> list[str]:
        """What lies there now, of every rank."""
        with self._typed("list"), suppress(FileNotFoundError):
            return sorted(os.listdir(self._staging))  # noqa: PTH208 - names are what is wanted
        return []

    def read(self, name: str) -> bytes:
        """One of these files."""
        with self._typed("read", name):
            return (self._staging / name).read_bytes()

    def remove(self, name: str) -> None:
        """Remove one of these files, if it is there."""
        with self._typed("remove", name), suppress(FileNotFoundError):
            (self._staging / name).unlink()

    @contextmanager
    def _typed(self, what: str, name: str = "") -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise write_error(error, name or str(self.path), what) from error

    def publish(self, name: str, data: bytes) -> None:
        """A small file that is there whole or not at all, and lasts."""
        temporary = f"{name}.{uuid.uuid4().hex[:8]}"
        with self.create(temporary) as out:
            out.write(data)
        with self._typed("put in place", name):
            (self._staging / temporary).rename(self._staging / name)
            self.names[self.names.index(temporary)] = name
            fsync_folder(self._staging)

    def commit(self, finish: Callable[[], list[str] | None]) -> bool:
        """Put everything in place, once.

        Args:
            finish: called while nobody else commits: writes what is missing, and returns the names
                of all files in the order in which they may appear; None: it is not time yet.

        Returns:
            Whether this call did it.

        Raises:
            WriteError: the operating system refused; the old folder is as it was.
        """
        with suppress(OSError):  # file systems without locks
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        if not self._staging.exists():
            return False
        names = finish()
        if names is None:
            with suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_UN)
            return False
        self.names = names
        try:
            with self._typed("put the new files in"):
                self._move_out()
                self._commit()
        finally:
            lock, self._lock = self._lock, -1  # ``__exit__`` closes it
            self._discard()
            self._lock = lock
        self.names, self._made = [], []
        return True

    def _move_out(self) -> None:
        """From inside the folder to beside it, from where one step exchanges the two."""
        for name in self.names:
            if not (self._staging / name).is_file():
                raise UsageError(
                    f"{show_path(self._staging / name)} is gone: another save into this folder"
                )
        if self._stays():
            return
        word = f"{digest_of(self.path)}-{uuid.uuid4().hex[:12]}"
        beside = self.path.parent / f".loadkit-save-{word}"
        try:
            self._staging.rename(beside)
        except OSError as error:
            if error.errno not in CANNOT:
                raise
            return
        self._staging = Path(beside)
