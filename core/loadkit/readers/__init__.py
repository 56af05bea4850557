"""Readers: bytes of files go into memory. Which one a load uses is decided here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from loadkit.errors import OptionError, ReadError
from loadkit.options import validate_options
from loadkit.readers.file_systems import LOCAL_FILE_SYSTEMS, may_alias
from loadkit.readers.surroundings import Surroundings
from loadkit.text import printable

if TYPE_CHECKING:
    from loadkit.config import LoadConfig
    from loadkit.readers.base import Reader
    from loadkit.sources.base import File

__all__ = ["ReaderChoice", "Surroundings", "can_alias", "choose_reader"]

COLD = 0.1  # files of which at most this part is in the page cache are cold
ASKED_FILES = 32


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
    return may_alias(file, Surroundings().kind)


def choose_reader(
    load_config: LoadConfig,
    files: Sequence[File],
    device: str,
    *,
    ranks: int = 1,
    around: Surroundings | None = None,
) -> ReaderChoice:
    """The reader that ``load_config.reader`` names; for ``auto`` the one that fits best.

    Args:
        load_config: ``reader``, ``alias`` and ``num_threads`` are used.
        files: the open files that will be read.
        device: where the parameters will live, as torch spells it (``cpu``, ``cuda:0``).
        ranks: how many load these files, this one among them.
        around: what to look at; the machine.

    Raises:
        UsageError: no such reader, or its distribution is missing; a reader of local files was
            named, and what is streamed are not.
    """
    own = {file.reader for file in files if file.reader}
    if own:
        return _of_its_own(load_config, own)
    if any(not file.local for file in files):
        return _of_remote(load_config, files)
    if load_config.reader != "auto":
        return ReaderChoice(_make(load_config.reader, load_config), "asked for by name")
    around = around or Surroundings()
    share = around.cached(_some(files)) if all(file.path is not None for file in files) else None
    cached = "" if share is None else f"; {share:.0%} of them is in the page cache"
    why_not = _why_not_mmap(load_config, files, device, around)
    if why_not:
        why = _why_direct(files, device, ranks, share, around)
        name = "direct" if why else "pread"
        return ReaderChoice(_make(name, load_config), why_not + (f"; {why}" if why else cached))
    reader = _make("mmap", load_config)
    try:
        for file in files:
            reader.view(file, 0, 0)  # maps it
    except ReadError as error:
        reader.close()
        return ReaderChoice(_make("pread", load_config), error.message)
    why = "local files that nobody else can write: parameters can be views of them"
    return ReaderChoice(reader, why + cached)


def _of_its_own(load_config: LoadConfig, own: set[str]) -> ReaderChoice:
    """The one reader that reads these files."""
    (name,) = own if len(own) == 1 else {""}
    if not name or load_config.reader not in ("auto", name):
        raise OptionError(
            f"these files are read by the reader {' and '.join(sorted(own))} alone, and "
            f"LoadConfig.reader is {load_config.reader!r}",
            detail={"options": ["reader"]},
            hint="leave it out",
        )
    return ReaderChoice(_make(name, load_config), "no other reads these files")


def _of_remote(load_config: LoadConfig, files: Sequence[File]) -> ReaderChoice:
    """The reader of files that are not on this machine."""
    named = load_config.reader
    if named not in ("auto", "range") and load_config.stream:
        reader = _make(named, load_config)
        if all(file.local or reader.reads_remote(file) for file in files):
            return ReaderChoice(reader, "asked for by name")
        reader.close()
        raise OptionError(
            f"LoadConfig.reader = {named!r} reads local files, and stream=true reads remote ones",
            detail={"options": ["reader", "stream"]},
            hint="leave one of them out: without stream the files are fetched first",
        )
    why = "remote files: ranges of them are requested"
    return ReaderChoice(_make("range", load_config), why)


def _make(name: str, load_config: LoadConfig) -> Reader:
    from loadkit.tables import readers

    make = cast("Callable[[LoadConfig], Reader]", readers.lookup(name))
    if name == load_config.reader:
        options = getattr(make, "options", {})
        validate_options(options, load_config.reader_options, f"reader '{printable(name, 64)}'")
    return make(load_config)


def _some(files: Sequence[File]) -> Sequence[File]:
    """A few of many files, to ask the page cache about."""
    return files[:: -(-len(files) // ASKED_FILES)] if files else files


def _why_not_mmap(
    load_config: LoadConfig, files: Sequence[File], device: str, around: Surroundings
) -> str:
    """Why ``auto`` does not map; empty if it does."""
    if not device.startswith("cpu"):
        return f"weights go to {device}"
    if load_config.alias != "auto":
        return f"alias is {load_config.alias!r}: all memory is owned"
    if not files:
        return "there are no files"
    for file in files:
        allowed, why = may_alias(file, around.kind)
        if not allowed:
            return f"{printable(file.name)}: {why}"
    return ""


def _why_direct(
    files: Sequence[File], device: str, ranks: int, share: float | None, around: Surroundings
) -> str:
    """Why reads should go past the page cache; empty if they should not.

    It pays where the files are cold, will not fit beside the weights, and nobody else reads them:
    other ranks, and the next load, would find nothing in the page cache.
    """
    memory = around.memory()
    if ranks > 1 or share is None or share > COLD or memory is None:
        return ""
    size = sum(file.size for file in files)
    owned = size if device.startswith("cpu") else 0
    if owned + size <= memory:
        return ""
    if not all(around.kind(file) in LOCAL_FILE_SYSTEMS and around.direct(file) for file in files):
        return ""
    return (
        f"past the page cache, which has {share:.0%} of {size:,} bytes and no room for them: "
        f"{memory:,} bytes of memory are available"
    )
