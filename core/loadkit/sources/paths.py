"""Names and paths of local sources: what is meant, and whether it stays where it may be."""

from __future__ import annotations

import difflib
import errno
import os
import re
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from loadkit.errors import PathError
from loadkit.file_checks import show, show_path
from loadkit.sources.local_file import read_error

if TYPE_CHECKING:
    from loadkit.config import LoadConfig

__all__ = ["allowed_roots", "blob_roots", "check_name", "expand_path", "resolve", "stat_root"]

MAX_NAME = 4_096  # bytes of a file's name with its folders


def expand_path(uri: str | os.PathLike[str]) -> Path:
    """A path or ``file://`` URI as an absolute path: ``~`` and relative parts expanded.

    Raises:
        PathError: it is empty, holds NUL, or a ``file://`` URI names another machine.
    """
    text = os.fspath(uri)
    if text.lower().startswith("file:"):
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise PathError(f"{show_path(text)} names another machine; file:// is for this one")
        text = unquote(parts.path)
    if not text or "\0" in text:
        raise PathError(f"{show_path(text)} is not a path")
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:  # ~nobody
        raise PathError(f"{show_path(text)}: {error}") from None


def check_name(name: object) -> str:
    r"""A file's name inside a source: relative, "/" between its parts, nothing clever.

    Raises:
        PathError: it is no string, empty, too long, absolute, holds NUL, ``\``, a drive, or an
            empty, ``.`` or ``..`` part.
    """
    problem = _name_problem(name)
    if problem:
        raise PathError(
            f"file name {show(name)} {problem}", file=name if isinstance(name, str) else None
        )
    return str(name)


def _name_problem(name: object) -> str | None:
    if not isinstance(name, str):
        return f"is not a string but {type(name).__name__}"
    if not name:
        return "is empty"
    if len(name.encode("utf-8", "surrogatepass")) > MAX_NAME:
        return f"is longer than {MAX_NAME} bytes"
    if "\0" in name:
        return "holds a NUL character"
    if "\\" in name or re.match(r"[A-Za-z]:", name):
        return "is a Windows path"
    if name.startswith("/"):
        return "is an absolute path"
    if any(part in ("", ".", "..") for part in name.split("/")):
        return "has an empty, '.' or '..' part"
    return None


def stat_root(path: Path, asked: str) -> os.stat_result:
    """What the source's path is, links followed.

    Raises:
        PathError: it does not exist (with what is there instead), loops, or is too long.
        ReadError: the operating system refuses.
    """
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise PathError(
            f"no such file or directory: {show_path(asked)}", file=str(path), hint=_nearby(path)
        ) from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise PathError(f"{show_path(asked)} is a loop of links", file=str(path)) from None
        if error.errno == errno.ENAMETOOLONG:
            raise PathError(f"{show_path(asked)} is too long for a path", file=str(path)) from None
        raise read_error(error, asked, "open") from error


def _nearby(path: Path) -> str | None:
    """What is there instead: the deepest folder that exists, and names like the one asked for."""
    asked, parent = path, path.parent
    while not parent.is_dir() and parent != parent.parent:
        asked, parent = parent, parent.parent
    if parent == parent.parent:
        return None
    try:
        with os.scandir(parent) as entries:
            names = [entry.name for entry in islice(entries, 1000)]
    except OSError:
        return None
    near = difflib.get_close_matches(asked.name, names, n=3)
    if near:
        return f"{show_path(parent)} holds {', '.join(show_path(name) for name in near)}"
    return f"{show_path(parent)} exists, {show_path(asked.name)} in it does not"


def resolve(path: Path, name: str) -> str:
    """The path with its links followed.

    Raises:
        PathError: a loop, or a link to nothing.
        ReadError: no such file, or the operating system refuses.
    """
    try:
        return os.path.realpath(path, strict=True)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise PathError(f"{show(name)} is a loop of links", file=name) from None
        if isinstance(error, FileNotFoundError) and path.is_symlink():
            raise PathError(
                f"{show(name)} is a link to {show(path.readlink())}, which does not exist",
                file=name,
                hint="the download is incomplete; fetch the file again",
            ) from None
        raise read_error(error, name, "open") from error


def blob_roots(root: str) -> list[str]:
    """The ``blobs`` folder of the hub cache that ``root`` is a snapshot of, if it is one."""
    for folder in (Path(root), *Path(root).parents):
        if folder.name == "snapshots" and folder.parent.name.startswith("models--"):
            return [str(folder.parent / "blobs")]
    return []


def allowed_roots(load_config: LoadConfig) -> list[str]:
    """The caller's own allowed folders, resolved."""
    roots = []
    for root in load_config.allowed_roots:
        path = expand_path(root)
        if not path.is_dir():
            raise PathError(f"allowed root {show_path(root)} is not a folder", file=str(path))
        roots.append(os.path.realpath(path))
    return roots
