"""Which files may be mapped for good: who can write them, and what file system holds them."""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from loadkit.sources.base import File

__all__ = ["file_system_of", "is_local", "kind_of", "may_alias"]

# A page fault in these is served by this kernel from its own disk or memory. All others (nfs,
# cifs, fuse, lustre, 9p, ceph ...) may block on another machine or process, or lose pages.
LOCAL_FILE_SYSTEMS = frozenset(
    {
        *("bcachefs", "btrfs", "erofs", "exfat", "ext2", "ext3", "ext4", "f2fs", "jfs", "nilfs2"),
        *("ntfs3", "overlay", "ramfs", "reiserfs", "squashfs", "tmpfs", "vfat", "xfs", "zfs"),
    }
)
_MOUNTS = Path("/proc/self/mountinfo")
_known: WeakKeyDictionary[File, str] = WeakKeyDictionary()


def is_local(file: File) -> bool:
    """Whether page faults in an open file block on nothing but this machine's own disks."""
    return sys.platform == "linux" and kind_of(file) in LOCAL_FILE_SYSTEMS


def kind_of(file: File) -> str:
    """The type of the file system that holds an open local file; empty where it cannot be told.

    Asked once: a file does not leave it while it is open.
    """
    if file.path is None:
        return ""
    known = _known.get(file)
    if known is None:
        known = _known[file] = file_system_of(file.path, os.fstat(file.fileno()).st_dev)
    return known


def may_alias(file: File, kind_of: Callable[[File], str]) -> tuple[bool, str]:
    """Whether weights may be views of this file, and the reason as a phrase.

    Args:
        file: an open file.
        kind_of: tells the type of the file system that holds it.
    """
    if file.path is None:
        return False, "it is not a local file"
    if sys.platform != "linux":
        return False, f"mapping for good is not tried on {sys.platform}"
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode):
        return False, "it is not a regular file"
    if found.st_uid not in (os.geteuid(), 0):
        return False, f"user {found.st_uid} owns it and may write it"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return False, f"others may write it (mode {stat.S_IMODE(found.st_mode):o})"
    kind = kind_of(file)
    if kind not in LOCAL_FILE_SYSTEMS:
        return False, f"its file system ({kind or 'unknown'}) is not known to be local"
    return True, f"a local file ({kind}) that nobody else can write"


def file_system_of(path: str, device: int, mounts: Path = _MOUNTS) -> str:
    """The type of the file system that holds an open file; empty where that cannot be told.

    Found by device number; overlay and btrfs hand out others than they are mounted with, there
    the mount point that holds the resolved path decides.
    """
    try:
        table = mounts.read_bytes()
    except OSError:
        return ""
    number = f"{os.major(device)}:{os.minor(device)}"
    lines = table.splitlines()
    wanted = f" {number} ".encode()
    for fields in _mounts(line for line in lines if wanted in line):
        if fields[2] == number:
            return _type(fields)
    resolved = os.path.realpath(path)
    best, kind = -1, ""
    for fields in _mounts(lines):
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        inside = point == "/" or resolved == point or resolved.startswith(point + "/")
        if inside and len(point) >= best:
            best, kind = len(point), _type(fields)
    return kind


def _mounts(lines: Iterable[bytes]) -> Iterator[list[str]]:
    """The fields of each line that is a mount's."""
    split = (os.fsdecode(line).split(" ") for line in lines)
    return (fields for fields in split if "-" in fields[6:])


def _type(fields: list[str]) -> str:
    """The type in a mount's line: what follows its optional fields."""
    return fields[fields.index("-", 6) + 1]
