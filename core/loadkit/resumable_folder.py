"""A folder that is written whole or not at all, in more than one go if need be.

Like an ``AtomicFolder``, but its hidden folder has one name, which the next process finds. Who
works in it holds its lock; a file system without locks gets a hidden folder of another name each
time, which nobody goes on with.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from loadkit.atomic_folder import AtomicFolder, digest_of
from loadkit.errors import ConflictError
from loadkit.file_checks import show_path
from loadkit.output_file import OutputFile

__all__ = ["ResumableFolder", "leftovers"]

log = logging.getLogger("loadkit")

_HIDDEN = ".loadkit-convert-"
_TRIES = 20  # times a hidden folder may vanish between finding and locking it


def leftovers(path: str | os.PathLike[str]) -> list[Path]:
    """The hidden folders that unfinished work on ``path`` left, or is in right now."""
    folder = Path(os.path.realpath(Path(path).expanduser()))
    name = f"{_HIDDEN}{digest_of(folder)}"
    found = [*folder.parent.glob(f"{name}*"), *folder.glob(f"{name}*")]
    return sorted(place for place in found if place.is_dir() and not place.is_symlink())


class ResumableFolder(AtomicFolder):
    """``with ResumableFolder(path, stale) as folder``: what is there already is in ``staging``.

    Attributes:
        keep: set it, and an error leaves the hidden folder for the next process.

    Raises:
        ConflictError: BUSY, another process is working in the hidden folder.
        UsageError, WriteError: as ``AtomicFolder``.
    """

    def __init__(self, path: str | os.PathLike[str], stale: Callable[[str], bool]) -> None:
        super().__init__(path, stale)
        self.keep = False
        self.locked = False

    @property
    def staging(self) -> Path:
        """The hidden folder."""
        return self._staging

    def reopen(self, name: str, size: int) -> OutputFile:
        """A file of the hidden folder, to go on after its first ``size`` bytes."""
        self.names.append(name)
        return OutputFile(self._staging / name, name, keep=size)

    def finished(self, name: str) -> None:
        """Take a file of the hidden folder as it is."""
        self.names.append(name)

    def clear(self, wanted: Collection[str] = ()) -> None:
        """Remove everything from the hidden folder but the files of these names."""
        for entry in list(os.scandir(self._staging)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            elif entry.name not in wanted or not entry.is_file(follow_symlinks=False):
                Path(entry.path).unlink()

    def _begin(self) -> None:
        self._make_parents()
        name = f"{_HIDDEN}{digest_of(self.path)}"
        for _ in range(_TRIES):
            self._make_staging(name, exist_ok=True)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                self._unlock()
                if error.errno == errno.EWOULDBLOCK:
                    self._busy()
                log.warning(
                    "%s: no locks here (%s), so that what is unfinished cannot be resumed",
                    show_path(self.path),
                    error.strerror,
                )
                with suppress(OSError):  # one of ours only if it was just made
                    self._staging.rmdir()
                self._make_staging(f"{name}-{uuid.uuid4().hex[:12]}")
                return
            if self._is_there():
                self.locked = True
                self._name_others()
                return
            self._unlock()  # the one who had it finished, and removed it
            time.sleep(0.01)
        self._busy()

    def _name_others(self) -> None:
        """Say what work without locks may have left."""
        for place in leftovers(self.path):
            if place != self._staging:
                log.warning("%s may be left from a killed run: remove it", show_path(place))

    def _busy(self) -> None:
        self._staging = self.path
        raise ConflictError(
            f"another process is writing to {show_path(self.path)}",
            code="BUSY",
            file=str(self.path),
            hint="wait for it, or stop it",
        )

    def _is_there(self) -> bool:
        """Whether the folder that is locked still has the name."""
        mine = os.fstat(self._lock)
        try:
            found = self._staging.lstat()
        except FileNotFoundError:
            return False
        return (mine.st_dev, mine.st_ino) == (found.st_dev, found.st_ino)

    def _unlock(self) -> None:
        os.close(self._lock)
        self._lock = -1

    def _discard(self) -> None:
        if self.keep and self.locked:
            self._staging = self.path  # so that the hidden folder stays
        super()._discard()
