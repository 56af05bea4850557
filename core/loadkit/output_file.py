"""One new file, written in order and made durable when it is closed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from loadkit.errors import WriteError
from loadkit.file_checks import show_path

__all__ = ["OutputFile", "write_error"]


def write_error(error: OSError, name: str, what: str, **where: Any) -> WriteError:
    """The operating system's refusal, typed; says what stays true."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    return WriteError(
        f"cannot {what} {show_path(name)}: {reason}",
        errno=error.errno,
        file=name,
        hint="nothing that was there before has changed",
        **where,
    )


class OutputFile:
    """One new file; ``write`` until it is closed, which makes it durable.

    Args:
        path: where it is made.
        name: what it is called in errors.
        keep: go on after this many bytes of the file that is there; None: there is none yet.

    Raises:
        WriteError: with ``errno``, ``file``, ``tensor`` and the offset that was not written.
    """

    def __init__(self, path: Path, name: str, *, keep: int | None = None) -> None:
        self.name = name
        self.size = keep or 0
        self._fd = -1
        new = os.O_CREAT | os.O_EXCL if keep is None else os.O_NOFOLLOW
        with self._typed("create" if keep is None else "go on with"):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | new, 0o666)
            try:
                if keep is not None:
                    os.ftruncate(self._fd, keep)
                    os.lseek(self._fd, keep, os.SEEK_SET)
            except OSError:
                os.close(self._fd)
                raise

    @contextmanager
    def _typed(self, what: str, tensor: str | None = None) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise write_error(error, self.name, what, tensor=tensor, offset=self.size) from error

    def write(self, data: memoryview | bytes, tensor: str | None = None) -> None:
        """Append all of ``data``, straight from where it lies."""
        rest = memoryview(data)
        with self._typed("write", tensor):
            while rest:
                count = os.write(self._fd, rest)
                self.size += count
                rest = rest[count:]

    def sync(self) -> None:
        """Make durable what was written so far."""
        with self._typed("fsync"):
            os.fsync(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self.sync()
        except BaseException:
            with suppress(OSError):
                os.close(self._fd)
            raise
        with suppress(OSError) if kind else self._typed("close"):
            os.close(self._fd)
