"""One open local file: exact reads from a descriptor that was checked once and stays open."""

from __future__ import annotations

import os
import stat
from functools import cache
from pathlib import Path

from loadkit.errors import ChangedError, PathError, ReadError, TruncatedError
from loadkit.file_checks import show
from loadkit.sources.base import File

__all__ = ["LocalFile"]

# O_NONBLOCK: opening a FIFO must not wait for a writer. O_NOFOLLOW: the path is resolved already.
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NOCTTY
_KERNEL_TREES = ("/proc", "/sys")  # "regular" files there are the kernel speaking


def require_regular(found: os.stat_result, name: str) -> None:
    """Refuse folders, FIFOs, devices, sockets and files of /proc and /sys.

    Raises:
        PathError: E_PATH, saying what it is.
    """
    kind = "regular file" if stat.S_ISREG(found.st_mode) else _kind(found.st_mode)
    if kind == "regular file" and found.st_dev in _kernel_devices():
        kind = "kernel file"
    if kind != "regular file":
        raise PathError(
            f"{show(name)} is a {kind}, not a regular file",
            file=name,
            hint="a checkpoint's files must be regular files",
        )


class LocalFile(File):
    """A regular local file, open until ``close``.

    Args:
        name: its name relative to the source's root.
        path: its resolved path; the last part must not be a link any more.

    Raises:
        PathError: it is no regular file.
        ReadError: the operating system refused to open it.
    """

    path: str

    def __init__(self, name: str, path: str) -> None:
        self.name = name
        self.path = path
        self._fd = -1
        try:
            require_regular(os.lstat(path), name)
            self._fd = os.open(path, _FLAGS)
            found = os.fstat(self._fd)
        except OSError as error:
            self.close()
            raise read_error(error, name, "open") from error
        try:
            require_regular(found, name)
        except PathError:
            self.close()
            raise
        self.size = found.st_size
        self._identity = _identity(found)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` bytes from ``offset``; nothing is allocated for a range past the end.

        Raises:
            TruncatedError: the file ends earlier.
            ReadError: the operating system failed; ``errno`` says how.
        """
        if offset < 0 or nbytes < 0:
            raise ReadError(
                f"a read of {nbytes} bytes at {offset} of {show(self.name)} makes no sense",
                file=self.name,
            )
        if offset + nbytes > self.size:
            raise self._truncated(offset, nbytes, max(0, self.size - offset))
        if nbytes == 0:
            return b""
        try:
            data = os.pread(self.fileno(), nbytes, offset)
            if len(data) == nbytes:
                return data
            return self._read_rest(data, offset, nbytes)
        except OSError as error:
            raise read_error(error, self.name, "read", offset) from error

    def _read_rest(self, start: bytes, offset: int, nbytes: int) -> bytes:
        """Go on after a short read. Interrupted calls are retried by ``os.preadv`` itself."""
        buffer = bytearray(nbytes)
        buffer[: len(start)] = start
        done = len(start)
        with memoryview(buffer) as view:
            while done < nbytes:
                got = os.preadv(self.fileno(), [view[done:]], offset + done)
                if got == 0:
                    raise self._truncated(offset, nbytes, done)
                done += got
        return bytes(buffer)

    def _truncated(self, offset: int, nbytes: int, got: int) -> TruncatedError:
        return TruncatedError(
            f"{show(self.name)} ends early: {nbytes} bytes were asked for at byte {offset}, "
            f"{got} are there",
            file=self.name,
            offset=offset,
            detail={"asked": nbytes, "found": got, "size": self.size},
            hint="the file is incomplete or was cut while in use; copy or download it again",
        )

    def fileno(self) -> int:
        """The open descriptor.

        Raises:
            ReadError: the file is closed.
        """
        if self._fd < 0:
            raise ReadError(f"{show(self.name)} is closed", file=self.name)
        return self._fd

    def identity(self) -> tuple[str, ...]:
        """Its path, device, inode, size and time of modification when it was opened."""
        return self.path, *map(str, self._identity)

    def check_unchanged(self) -> None:
        """Compare device, inode, size and mtime, of the open file and of its path.

        Raises:
            ChangedError: it was rewritten, cut, grown, replaced or removed since it was opened.
        """
        try:
            if _identity(os.fstat(self.fileno())) != self._identity:
                raise self._changed("was written to")
            if _identity(Path(self.path).stat()) != self._identity:
                raise self._changed("was replaced")
        except FileNotFoundError:
            raise self._changed("was removed") from None
        except OSError as error:
            raise read_error(error, self.name, "check") from error

    def _changed(self, what: str) -> ChangedError:
        return ChangedError(
            f"{show(self.name)} {what} while it was in use",
            file=self.name,
            hint="load again when nothing writes to the checkpoint",
        )

    def close(self) -> None:
        """Close the descriptor; may be called twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __repr__(self) -> str:
        return f"LocalFile({self.name!r}, {self.size} bytes)"


def _identity(found: os.stat_result) -> tuple[int, int, int, int]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@cache
def _kernel_devices() -> set[int]:
    """Device numbers of the mounted kernel trees."""
    return {Path(tree).stat().st_dev for tree in _KERNEL_TREES if Path(tree).is_dir()}


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "folder",
        stat.S_IFIFO: "FIFO",
        stat.S_IFCHR: "device",
        stat.S_IFBLK: "device",
        stat.S_IFSOCK: "socket",
        stat.S_IFLNK: "link",
    }
    return kinds.get(stat.S_IFMT(mode), "special file")


def read_error(error: OSError, name: str, verb: str, offset: int | None = None) -> ReadError:
    """The error of a failed ``verb`` on file ``name``, with the operating system's reason."""
    hint = None
    if error.errno is not None and os.strerror(error.errno) == "Too many open files":
        hint = "raise the limit of open files (ulimit -n)"
    return ReadError(
        f"cannot {verb} {show(name)}: {error.strerror or error}",
        errno=error.errno,
        file=name,
        offset=offset,
        hint=hint,
    )
