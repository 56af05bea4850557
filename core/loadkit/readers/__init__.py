"""Readers: bytes of files go into memory. Which one a load uses is decided here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from loadkit.errors import ReadError
from loadkit.readers.file_systems import may_alias
from loadkit.text import printable

if TYPE_CHECKING:
    from loadkit.config import LoadConfig
    from loadkit.readers.base import Reader
    from loadkit.sources.base import File

__all__ = ["ReaderChoice", "can_alias", "choose_reader"]


@dataclass(frozen=True, slots=True)
class ReaderChoice:
    """The reader of one load and, as a sentence for the report, why it is that one."""

    reader: Reader
    why: str


def can_alias(file: File) -> tuple[bool, str]:
    """Whether parameters may be views of this file, and why (not).

    They may when it is a regular file of this user or of root that nobody else can write, on a
    local file system. Its bytes must stay: a rewrite would change the weights.
    """
    return may_alias(file)


def choose_reader(load_config: LoadConfig, files: Sequence[File], device: str) -> ReaderChoice:
    """The reader that ``load_config.reader`` names; for ``auto`` the one that fits best.

    Args:
        load_config: ``reader``, ``alias`` and ``num_threads`` are used.
        files: the open files that will be read.
        device: where the parameters will live, as torch spells it (``cpu``, ``cuda:0``).

    Raises:
        UsageError: no such reader, or its distribution is missing.
    """
    if load_config.reader != "auto":
        return ReaderChoice(_make(load_config.reader, load_config), "asked for by name")
    why_not = _why_not_mmap(load_config, files, device)
    if why_not:
        return ReaderChoice(_make("pread", load_config), why_not)
    reader = _make("mmap", load_config)
    try:
        for file in files:
            reader.view(file, 0, 0)  # maps it
    except ReadError as error:
        reader.close()
        return ReaderChoice(_make("pread", load_config), error.message)
    return ReaderChoice(
        reader, "local files that nobody else can write: parameters can be views of them"
    )


def _make(name: str, load_config: LoadConfig) -> Reader:
    from loadkit.tables import readers

    make = cast("Callable[[LoadConfig], Reader]", readers.lookup(name))
    return make(load_config)


def _why_not_mmap(load_config: LoadConfig, files: Sequence[File], device: str) -> str:
    """Why ``auto`` does not map; empty if it does."""
    if not device.startswith("cpu"):
        return f"weights go to {device}"
    if load_config.alias != "auto":
        return f"alias is {load_config.alias!r}: all memory is owned"
    if not files:
        return "there are no files"
    for file in files:
        allowed, why = can_alias(file)
        if not allowed:
            return f"{printable(file.name)}: {why}"
    return ""
