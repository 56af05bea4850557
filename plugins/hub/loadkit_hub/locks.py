"""One process fetches, the others wait for it: file locks that a cache may not allow."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from loadkit.errors import DownloadError
from loadkit.file_checks import show_path

__all__ = ["locked"]

logger = logging.getLogger(__name__)

_POLL = 0.05  # seconds
_TELL = 10.0  # seconds between two lines about waiting
_NO_LOCKS = frozenset(
    {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
)
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


@contextmanager
def locked(path: Path, seconds: float, moves: Callable[[], object]) -> Iterator[bool]:
    """Hold a lock that other processes, ``huggingface_hub``'s among them, look at too.

    A lock file that nobody holds does not count.

    Args:
        path: of the lock file.
        seconds: how long the holder may stand still.
        moves: something that changes while the holder works.

    Yields:
        Whether it is held; False where this place has no locks.

    Raises:
        DownloadError: E_TIMEOUT, the holder stood still; names the lock file.
    """
    with ExitStack() as closing:
        yield _acquire(path, seconds, moves, closing)


def _open(path: Path) -> int | None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, _FLAGS, 0o664)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        _without(path, error)
        return None


def _without(path: Path, error: OSError) -> None:
    logger.warning(
        "no lock at %s (%s): going on without one", show_path(path), error.strerror or error
    )


def _acquire(path: Path, seconds: float, moves: Callable[[], object], closing: ExitStack) -> bool:
    """Whether the lock is held; a file that was removed meanwhile does not count."""
    seen = moves()
    until, told = time.monotonic() + seconds, 0.0
    while True:
        descriptor = _open(path)
        if descriptor is None:
            return False
        closing.callback(os.close, descriptor)
        while (held := _try(descriptor, path)) is None:
            now = time.monotonic()
            if (current := moves()) != seen:
                seen, until = current, now + seconds
            if now >= until:
                raise DownloadError(
                    f"another process holds {show_path(path)} and has not gone on for "
                    f"{seconds:g} s",
                    code="E_TIMEOUT",
                    detail={"lock": str(path)},
                    hint="end that process, or raise LoadConfig.network_deadline",
                )
            if now >= told:
                logger.info("waiting for another process, which holds %s", show_path(path))
                told = now + _TELL
            time.sleep(_POLL)
        if not held or os.fstat(descriptor).st_nlink:
            return held


def _try(descriptor: int, path: Path) -> bool | None:
    """True: locked; None: somebody else has it; False: there are no locks here."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        _without(path, error)
        return False
    return True
