"""Where downloads are kept, and that only one process at a time makes one.

A folder holds the files by their names, and in ``.loadkit/`` what is known of each: a record of
the content it is (size, ETag), a lock, and, while it is fetched, the part that is there.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from loadkit.errors import WriteError
from loadkit.file_checks import show, show_path
from loadkit.network.answers import Pin

if TYPE_CHECKING:
    from loadkit.config import LoadConfig

__all__ = ["Kept", "folder_of"]

logger = logging.getLogger(__name__)

_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_POLL = 0.1  # seconds between two looks at a lock that another process has
_SAY_AGAIN = 30.0  # seconds between two lines about it
MAX_RECORD = 4096  # bytes


def folder_of(load_config: LoadConfig, shown: str) -> Path:
    """The folder that a source's files are kept in: ``download_dir`` itself, or one of the cache.

    Args:
        load_config: ``download_dir`` or else ``cache_dir`` count.
        shown: the source's address without secrets: another signature is no other source.
    """
    if load_config.download_dir is not None:
        return Path(load_config.download_dir).expanduser().absolute()
    if load_config.cache_dir is not None:
        root = Path(load_config.cache_dir).expanduser()
    else:
        own = os.environ.get("LOADKIT_CACHE") or os.environ.get("XDG_CACHE_HOME")
        root = Path(own or Path("~/.cache").expanduser()) / "loadkit"
    plain = re.sub(r"[^A-Za-z0-9.]+", "-", shown.partition("?")[0]).strip("-.")[-80:]
    digest = hashlib.sha256(shown.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return (root / "remote" / f"{plain}-{digest}").absolute()


class Kept:
    """One file's place in a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.path = folder / name
        self.part = folder / ".loadkit" / f"{name}.part"
        self.journal = folder / ".loadkit" / f"{name}.part.json"
        self._record = folder / ".loadkit" / f"{name}.json"
        self._lock = folder / ".loadkit" / f"{name}.lock"

    def is_there(self, pin: Pin) -> bool:
        """Whether the whole file is there, of this very content as far as anybody can tell."""
        if pin.etag is None and pin.modified is None:
            return False
        try:
            size = self.path.stat().st_size
            found = json.loads(self._record.read_bytes()[:MAX_RECORD])
        except (OSError, ValueError):
            return False
        return bool(size == pin.size and found == asdict(pin))

    def make_folders(self) -> None:
        """The folders that it needs.

        Raises:
            WriteError: they cannot be made.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.part.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self.cannot("make the folder of", error) from error

    def finish(self, part: Path, pin: Pin) -> None:
        """What was fetched into ``part`` becomes the file, whole or not at all.

        Raises:
            WriteError: it cannot be put there.
        """
        try:
            self._record.unlink(missing_ok=True)  # of an older content
            part.replace(self.path)
            new = self._record.with_name(f"{self._record.name}.{os.getpid()}")
            new.write_text(json.dumps(asdict(pin)))
            new.replace(self._record)
        except OSError as error:
            raise self.cannot("keep", error) from error

    @contextmanager
    def locked(self, pin: Pin) -> Iterator[bool]:
        """Alone with this file; gives whether that is so: some file systems have no locks.

        Without them several processes may fetch one file, each into a part of its own.

        Raises:
            WriteError: the lock cannot be made.
        """
        try:
            number = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self.cannot("lock", error) from error
        try:
            yield self._take(number, pin)
        finally:
            os.close(number)  # and the lock with it

    def _take(self, number: int, pin: Pin) -> bool:
        said = 0.0
        while True:
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                pass
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise self.cannot("lock", error) from error
                logger.warning(
                    "%s: no locks there (%s): other processes may fetch the same",
                    show_path(self.path.parent), error.strerror,
                )  # fmt: skip
                return False
            if self.is_there(pin):  # its holder is done with it but for a last step
                return True
            if time.monotonic() - said > _SAY_AGAIN:
                said = time.monotonic()
                logger.warning("%s: waiting for another process that fetches it", show(self.name))
            time.sleep(_POLL)

    def cannot(self, verb: str, error: OSError) -> WriteError:
        """The error of a step that the operating system refused."""
        return WriteError(
            f"cannot {verb} {show_path(self.path)}: {error.strerror or error}",
            errno=error.errno,
            file=self.name,
            hint="set cache_dir or download_dir to a folder with room that can be written to, or "
            "stream=true to keep no copy",
        )
