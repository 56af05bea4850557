"""``folder:Q4_K_M``: one of several GGUF models in a folder, by the word in its file's name."""

from __future__ import annotations

import os
import re
from pathlib import Path

from loadkit.errors import NoWeightsError
from loadkit.file_checks import show, show_path

__all__ = ["chosen_file"]

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-\d{5}")
_WORD = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SHOWN = 20


def chosen_file(path: Path) -> Path:
    """The file that ``folder:WORD`` means, of a split one its first part; other paths stay.

    Such a path means that only where nothing is called so and the folder is there.

    Raises:
        NoWeightsError: no GGUF file of the folder has the word in its name, or several models have.
    """
    name, colon, word = path.name.rpartition(":")
    folder = path.with_name(name) if name else path.parent
    if not colon or not _WORD.fullmatch(word) or os.path.lexists(path) or not folder.is_dir():
        return path
    pattern = re.compile(rf"(^|[-._]){re.escape(word)}([-._]|$)", re.IGNORECASE)
    models: dict[str, Path] = {}
    others: list[str] = []
    for file in sorted(folder.glob("*.gguf")):
        part = _PART.fullmatch(file.stem)
        stem = part["stem"] if part else file.stem
        if file.name.startswith("mmproj"):
            continue
        if pattern.search(stem):
            models.setdefault(stem, file)
        elif stem not in others:
            others.append(stem)
    if len(models) == 1:
        return next(iter(models.values()))
    if models:
        names = [file.name for file in models.values()]
        raise NoWeightsError(
            f"{show_path(folder)} holds {len(models)} GGUF models named {show(word)}: "
            + ", ".join(map(show, names[:_SHOWN])),
            code="E_AMBIGUOUS",
            detail={"files": names},
            hint="name the file itself as the source",
        )
    shown = ", ".join(map(show, others[:_SHOWN])) or "no GGUF file"
    raise NoWeightsError(
        f"{show_path(folder)} holds no GGUF file named {show(word)}; it holds {shown}",
        detail={"word": word, "files": others},
        hint="give a word of one of those names after the colon" if others else None,
    )
