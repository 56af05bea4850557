"""The tensorizer library: imported when it is needed, its errors typed, its words checked.

What it says may hold a presigned address or a key's length: of what went over a network only the
kind of error is told.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from loadkit.availability import installed_version
from loadkit.errors import (
    DownloadError,
    FormatError,
    IntegrityError,
    LoadkitError,
    NotInstalledError,
    OptionError,
    PluginError,
    ReadError,
)
from loadkit.file_checks import show, show_path
from loadkit.known_names import pip_line
from loadkit.text import printable

__all__ = ["library", "read_key", "reading_errors"]

KEY_BYTES = 32
_STATUS = re.compile(r"HTTP/[\d.]+ (\d{3})")


def library(module: str = "tensorizer") -> Any:
    """A module of the library.

    Raises:
        NotInstalledError: says the pip line.
        PluginError: it is there and cannot be imported.
    """
    if installed_version("tensorizer") is None:
        raise NotInstalledError(
            "load format 'tensorizer' needs the package tensorizer to write files, and to read "
            "those that are encrypted or lie behind a URI",
            hint=pip_line("tensorizer"),
        )
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise PluginError(
            f"the package tensorizer cannot be imported: {type(error).__name__}: "
            f"{printable(error)}",
            hint="it needs boto3, hiredis, libnacl, numpy, protobuf, psutil and redis",
        ) from error


def read_key(path: str) -> bytes:
    """The key of a key file: 32 bytes, as they are.

    Raises:
        OptionError: it is no such file; says nothing of what is in it.
    """
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - a path that the user gave
            key = file.read(KEY_BYTES + 1)
    except OSError as error:
        raise _no_key(path, f"cannot be read: {error.strerror}") from None
    if len(key) != KEY_BYTES:
        raise _no_key(path, f"does not hold {KEY_BYTES} bytes")
    return key


def _no_key(path: str, said: str) -> OptionError:
    return OptionError(
        f"encryption_keyfile {show_path(path)} {said}",
        detail={"option": "encryption_keyfile"},
        hint=f"it holds the key itself: {KEY_BYTES} bytes",
    )


@contextmanager
def reading_errors(name: str, *, remote: bool) -> Iterator[None]:
    """Whatever the library raises while it reads a file, typed.

    Args:
        name: what is read, as it may be shown.
        remote: whether it comes over a network: then nothing of the text is told.
    """
    try:
        yield
    except (LoadkitError, GeneratorExit, KeyboardInterrupt):
        raise
    except Exception as error:
        kind = type(error).__name__
        found = None if remote else error
        if kind == "HashMismatchError":
            raise IntegrityError(
                f"{show(name)}: a tensor is not what its hash says: {_told(error, remote)}",
                code="E_HASH",
                file=name,
                hint="the file is damaged: download or copy it again",
            ) from found
        if kind == "CryptographyError":
            raise IntegrityError(
                f"{show(name)} cannot be decrypted: the key is not the one it was encrypted with, "
                "or the file is damaged",
                code="E_DECRYPT",
                file=name,
                hint="give the encryption_keyfile that it was saved with",
            ) from found
        if remote and isinstance(error, OSError):
            status = _STATUS.search(str(error))
            said = f"the server answered {status[1]}" if status else "the way to it failed"
            refused = status is not None and status[1] in ("401", "403")
            raise DownloadError(
                f"{show(name)} could not be read: {said}",
                code="E_AUTH" if refused else "E_DOWNLOAD",
                file=name,
                hint="check the URI, s3_endpoint and the credentials",
            ) from None
        if isinstance(error, OSError):
            raise ReadError(
                f"{show(name)} could not be read: {error.strerror or kind}", file=name
            ) from error
        raise FormatError(
            f"the tensorizer library refuses {show(name)}: {kind}{_told(error, remote)}",
            code="E_FORMAT",
            file=name,
        ) from found


def _told(error: Exception, remote: bool) -> str:
    return "" if remote else f": {printable(error)}"
