"""The files of a local copy that no listing describes."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from loadkit.errors import LoadkitError
from loadkit.sources.base import FileInfo
from loadkit_hub.choice import files_of_index

__all__ = ["files_below"]


def files_below(folder: Path) -> list[FileInfo]:
    """Every file below a folder, and what its index names; those that are missing have 0 bytes."""
    found: dict[str, int] = {}
    for where, _, names in os.walk(folder):
        for name in names:
            path = Path(where, name)
            inside = path.relative_to(folder).as_posix()
            found[inside] = path.stat().st_size if path.is_file() else 0
    for index in [name for name in found if name.endswith(".index.json") and "/" not in name]:
        with suppress(LoadkitError, OSError):  # the loader says what is wrong with it
            for name in files_of_index(Path(folder, index).read_bytes(), index):
                found.setdefault(name, 0)
    return [FileInfo(name, size) for name, size in sorted(found.items())]
