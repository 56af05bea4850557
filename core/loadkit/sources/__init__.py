"""Where checkpoints come from: one source per URI scheme, and a plain path is one too."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadkit.errors import NotInstalledError, PathError
from loadkit.file_checks import show_path
from loadkit.known_names import pip_line
from loadkit.sources.base import File, FileInfo, Source

if TYPE_CHECKING:
    from loadkit.config import LoadConfig

__all__ = ["File", "FileInfo", "Source", "open_source", "scheme_of"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")  # two letters at least: C:\ is a drive
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?:@[\w./-]+)?(?::[\w.-]+)?")
_FILE_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".json", ".tensors")


def scheme_of(source: str | os.PathLike[str]) -> str:
    """The scheme that a source's URI names: ``file`` for a plain path, ``hf`` for ``org/name``.

    ``org/name`` means a hub repository only where nothing of that path exists, its first part
    included, and the name is not that of a weight file.
    """
    text = os.fspath(source)
    match = _SCHEME.match(text)
    if match:
        return match[1].lower()
    if (
        isinstance(source, str)
        and _REPO_ID.fullmatch(text)
        and not text.endswith(_FILE_SUFFIXES)
        and not os.path.lexists(text)
        and not Path(text).parent.exists()
    ):
        return "hf"
    return "file"


def open_source(source: str | os.PathLike[str], load_config: LoadConfig) -> Source:
    """The place a checkpoint lies in, opened.

    Args:
        source: a path (a folder or one file; ``~`` and relative ones are fine), or a URI whose
            scheme a registered source handles.
        load_config: its ``allowed_roots`` and ``subfolder`` are used here.

    Raises:
        PathError: a path that does not exist, loops, or is no folder or regular file.
        UnknownNameError: no source of that scheme; it names those that are known.
        NotInstalledError: the scheme is known, and its distribution is not installed.
    """
    given: object = os.fspath(source) if isinstance(source, os.PathLike) else source
    if not isinstance(given, str):
        raise PathError(f"a source is a path or a URI, not {type(source).__name__}")
    scheme = scheme_of(source)
    if scheme == "file":
        from loadkit.sources.local import LocalSource

        return LocalSource(source, load_config)
    from loadkit import tables  # not at the top: tables lead to plugins, a path needs none

    if scheme == "hf" and "://" not in os.fspath(source) and "hf" not in tables.sources.names():
        raise NotInstalledError(
            f"no such file or directory: {show_path(source)}; it may be a repository of the "
            "Hugging Face hub, and the source for that is not installed",
            detail={"source": os.fspath(source), "extra": "hub"},
            hint=f"give the folder it was downloaded to, or {pip_line('hub')}",
        )
    found: Any = tables.sources.lookup(scheme)
    opened: Source = found(os.fspath(source), load_config)
    return opened
