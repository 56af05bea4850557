"""Exchanging two folders in one step, and carrying files from one into the other by hard links."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

__all__ = ["CANNOT", "carry_over", "exchange", "fsync_folder", "walk_files"]

# What systems say of hard links, exchanges and renames that they do not do here.
CANNOT = frozenset(
    {
        errno.EACCES,
        errno.EBUSY,
        errno.EINVAL,
        errno.EMLINK,
        errno.ENOSYS,
        errno.ENOTSUP,
        errno.EPERM,
        errno.EROFS,
        errno.EXDEV,
    }
)
_SWAP = 2  # RENAME_EXCHANGE of Linux, RENAME_SWAP of macOS
_AT_FDCWD = -100


def exchange(first: Path, second: Path) -> None:
    """Let two folders change names: at every moment each name is one of the two, whole.

    Raises:
        OSError: it did not happen; ENOSYS where the system has no such call.
    """
    call = _exchange_call()
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(first))
    if call(os.fsencode(first), os.fsencode(second)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(first))


@cache
def _exchange_call() -> Callable[[bytes, bytes], int] | None:
    libc = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "darwin":
        swap = getattr(libc, "renamex_np", None)
        return None if swap is None else lambda a, b: int(swap(a, b, _SWAP))
    rename = getattr(libc, "renameat2", None)
    if rename is None:
        return None
    return lambda a, b: int(rename(_AT_FDCWD, a, _AT_FDCWD, b, _SWAP))


def fsync_folder(folder: Path) -> None:
    """Make a folder's entries last through a loss of power, where its file system can."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def walk_files(root: Path, inside: str = "") -> Iterator[tuple[str, bool]]:
    """Every entry under a folder as (relative name with "/", whether it is a folder), folders
    before what is in them; links are not followed.
    """
    waiting = [inside]
    while waiting:
        folder = waiting.pop()
        with os.scandir(root / folder) as entries:
            for entry in entries:
                name = f"{folder}/{entry.name}" if folder else entry.name
                is_folder = entry.is_dir(follow_symlinks=False)
                yield name, is_folder
                if is_folder:
                    waiting.append(name)


def carry_over(old: Path, new: Path, leave: Callable[[str], bool]) -> None:
    """Give every file of ``old`` a second name in ``new``, but for those that ``leave`` names.

    What ``new`` has already stays. Folders are made with the same permissions, links are linked
    as links; no byte is copied.

    Raises:
        OSError: one of ``CANNOT`` where the file system has no hard links, or holds another.
    """
    dropped: set[str] = set()
    for name, is_folder in walk_files(old):
        if leave(name) or name.rpartition("/")[0] in dropped:
            if is_folder:
                dropped.add(name)
            continue
        if is_folder:
            if not (new / name).is_dir():
                (new / name).mkdir()
                shutil.copystat(old / name, new / name)
        elif not os.path.lexists(new / name):
            os.link(old / name, new / name, follow_symlinks=False)
