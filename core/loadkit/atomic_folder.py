"""A folder that is written whole or not at all.

Files are written and fsynced in a hidden folder first. Then that folder takes the place of the old
one in one step: a rename where nothing was, an exchange of the two names where there was something.
Other files of the old folder come along by hard links. At every moment, a crash included, the name
shows the old contents or the new.

Where that cannot be (the folder is a mount point, the process stands in it, its parent cannot be
written, the file system has no exchange or no hard links), files are renamed one by one, in the
order they were written; an error puts the old ones back. Only a kill between two of these renames
could leave a mixture there.

No byte of a file that exists is ever overwritten: old files lose their names at the end, and what
still maps them (aliased parameters) keeps them.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from loadkit.errors import UsageError
from loadkit.file_checks import show_path
from loadkit.folder_swap import CANNOT, carry_over, exchange, fsync_folder, walk_files
from loadkit.output_file import OutputFile, write_error

__all__ = ["AtomicFolder", "digest_of"]

log = logging.getLogger("loadkit")

_HIDDEN = ".loadkit-save-"
_FORGOTTEN = 60.0  # seconds after which a hidden folder that nobody holds is removed


def digest_of(path: Path) -> str:
    """A short word for a folder's name, which hidden folders of it carry in theirs."""
    return hashlib.sha256(os.fsencode(path.name)).hexdigest()[:8]


class AtomicFolder:
    """``with AtomicFolder(path, stale) as folder: folder.create(name)...``: all of it, or nothing.

    Args:
        path: the folder; its parents are made where they are missing. A link is followed.
        stale: whether a file of the old folder, by name, belongs to what is replaced, and goes.

    Raises:
        UsageError: there is something at ``path`` that is no folder, or a folder where a file
            has to go.
        WriteError: the operating system refused; the old folder is as it was.
    """

    def __init__(self, path: str | os.PathLike[str], stale: Callable[[str], bool]) -> None:
        self.path = Path(os.path.realpath(Path(path).expanduser()))
        self.names: list[str] = []
        self._stale = stale
        self._made: list[Path] = []  # parents that were missing
        self._lock = -1
        self._staging = self.path

    def __enter__(self) -> Self:
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"{show_path(self.path)} is a file: give the name of a folder")
        try:
            self._begin()
        except OSError as error:
            self._discard()
            raise write_error(error, str(self.path), "make a folder beside") from error
        except BaseException:
            self._discard()
            raise
        return self

    def create(self, name: str) -> OutputFile:
        """A new file of the folder; ``name`` is the program's own, never a file's."""
        self.names.append(name)
        return OutputFile(self._staging / name, name)

    def path_of(self, name: str) -> Path:
        """Where a file that was created lies until the folder is in place."""
        return self._staging / name

    def staged(self, name: str) -> Path:
        """Where a file that was created lies until everything is put in place."""
        return self._staging / name

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._commit()
        except OSError as problem:
            raise write_error(problem, str(self.path), "put the new files in") from problem
        finally:
            self._discard()

    # -- the hidden folder ---------------------------------------------------------------------

    def _begin(self) -> None:
        self._make_parents()
        self._make_staging(f"{_HIDDEN}{digest_of(self.path)}-{uuid.uuid4().hex[:12]}")
        with suppress(OSError):  # file systems without locks
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _make_parents(self) -> None:
        parent = self.path.parent
        for missing in reversed([p for p in (parent, *parent.parents) if not p.exists()]):
            missing.mkdir(exist_ok=True)
            self._made.append(missing)
        self._remove_forgotten(parent)

    def _make_staging(self, name: str, *, exist_ok: bool = False) -> None:
        """The hidden folder: beside the folder, or in it where it cannot be beside."""
        staging = (self.path if self._stays() else self.path.parent) / name
        try:
            staging.mkdir(exist_ok=exist_ok)
        except OSError as error:
            if error.errno not in CANNOT or not self.path.exists() or staging.parent == self.path:
                raise
            staging = self.path / name
            staging.mkdir(exist_ok=exist_ok)
        self._staging = staging
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        self._lock = os.open(staging, flags)

    def _stays(self) -> bool:
        """Whether the folder itself has to stay where it is: mounted, or stood in."""
        if not self.path.exists():
            return False
        if self.path.stat().st_dev != self.path.parent.stat().st_dev:
            return True
        with suppress(FileNotFoundError):  # the process stands in a folder that is gone
            here = Path(os.path.realpath(Path.cwd()))
            return self.path in (here, *here.parents)
        return False

    def _remove_forgotten(self, parent: Path) -> None:
        """Remove hidden folders of this name that a killed process left."""
        found = [
            *parent.glob(f"{_HIDDEN}{digest_of(self.path)}-*"),
            *self.path.glob(f"{_HIDDEN}*"),
        ]
        for folder in found:
            with suppress(OSError):
                if time.time() - folder.stat().st_mtime < _FORGOTTEN:
                    continue
                fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
                finally:
                    os.close(fd)

    def _discard(self) -> None:
        """Remove the hidden folder, and parents that were made for nothing."""
        if self._staging != self.path:
            shutil.rmtree(self._staging, ignore_errors=True)
            if self._staging.exists():
                log.warning("%s could not be removed", show_path(self._staging))
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        for folder in reversed(self._made):
            with suppress(OSError):
                folder.rmdir()

    # -- the step ------------------------------------------------------------------------------

    def _commit(self) -> None:
        for name in self.names:
            if (self.path / name).is_dir():
                raise UsageError(
                    f"{show_path(self.path / name)} is a folder, and a file goes there"
                )
        for name, is_folder in walk_files(self._staging):
            if is_folder:
                fsync_folder(self._staging / name)
        fsync_folder(self._staging)
        if self._staging.parent == self.path:
            self._rename_files()
            return
        try:
            self._swap()
        except OSError as error:
            if error.errno not in CANNOT or not self.path.exists():
                raise
            log.debug("%s: files are renamed one by one: %s", show_path(self.path), error)
            self._rename_files()

    def _swap(self) -> None:
        """Let the hidden folder take the old one's place."""
        old, new = self.path, self._staging
        if not os.path.lexists(old):
            new.rename(old)
            self._durable(partial(old.rename, new))
            return
        carry_over(old, new, self._goes)
        shutil.copystat(old, new)
        with suppress(PermissionError):
            owner = old.stat()
            os.chown(new, owner.st_uid, owner.st_gid)
        exchange(new, old)
        self._durable(partial(exchange, new, old))
        with suppress(OSError):  # what came into the old one in the meantime
            carry_over(new, old, self._goes)

    def _goes(self, name: str) -> bool:
        """Whether a file of the old folder is one that the new contents replace."""
        ours = name.startswith((_HIDDEN, self._staging.name))
        return name in self.names or self._stale(name) or ours

    def _durable(self, undo: Callable[[], object]) -> None:
        """Fsync the parent; where that fails the old contents come back."""
        try:
            fsync_folder(self.path.parent)
        except BaseException:
            undo()
            raise

    def _rename_files(self) -> None:
        """Rename file by file, put the old ones back on an error."""
        aside = self._staging / f"{_HIDDEN}old"
        aside.mkdir()
        undo: list[Callable[[], object]] = []
        try:
            for name in self.names:
                self._rename_file(name, aside / str(len(undo)), undo)
            for file in list(self.path.iterdir()):
                if self._stale(file.name) and file.name not in self.names:
                    kept = aside / str(len(undo))
                    file.rename(kept)
                    undo.append(partial(kept.rename, file))
            for folder in {(self.path / name).parent for name in self.names} | {self.path}:
                fsync_folder(folder)
        except BaseException:
            try:
                for step in reversed(undo):
                    step()
            except OSError:
                log.exception("the old files are in %s", show_path(aside))
                self._staging = self.path  # keep it
                raise
            raise

    def _rename_file(self, name: str, kept: Path, undo: list[Callable[[], object]]) -> None:
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(target):
            (self._staging / name).rename(target)
            undo.append(target.unlink)
            return
        try:
            os.link(target, kept, follow_symlinks=False)
        except OSError as error:
            if error.errno not in CANNOT:
                raise
            target.rename(kept)
        undo.append(partial(kept.replace, target))
        (self._staging / name).replace(target)
