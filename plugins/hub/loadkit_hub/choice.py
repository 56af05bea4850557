"""Which files of a repository one load is about: one format's weights, and the small ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from loadkit.detect import FORMAT_PATTERNS, detect_load_format, kind_of
from loadkit.errors import IndexFileError, LoadkitError, NoWeightsError
from loadkit.file_checks import show
from loadkit.file_patterns import first_fit
from loadkit.json_safe import parse_json
from loadkit.sources.paths import check_name

if TYPE_CHECKING:
    from loadkit.config import LoadConfig
    from loadkit.sources.base import FileInfo

__all__ = ["belongs", "files_of_index", "find_quant", "is_small", "parted", "weight_names"]

SMALL = 64 << 20  # bytes of the largest small file: tokenizers of 20 MB exist
_SMALL_NAMES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "LICENSE*", "README.md")
_PART = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")


def is_small(info: FileInfo, load_config: LoadConfig) -> bool:
    """Whether a file goes along with any format's weights. Code does only if it may be run."""
    name = info.name.rpartition("/")[2]
    patterns = (*_SMALL_NAMES, "*.py") if load_config.trust_remote_code else _SMALL_NAMES
    return (
        "/" not in info.name
        and info.size <= SMALL
        and any(fnmatchcase(name, pattern) for pattern in patterns)
        and first_fit(info.name, load_config.ignore_patterns) is None
    )


def weight_names(listing: Sequence[FileInfo], load_config: LoadConfig) -> list[str]:
    """The weight files that a load would look at: of the one format that is asked for or decided.

    An index may leave out some of them; the loader knows.
    """
    if load_config.allow_patterns_overrides is not None:
        patterns = load_config.allow_patterns_overrides
        return [info.name for info in listing if first_fit(info.name, patterns) is not None]
    wanted = load_config.load_format
    if wanted in ("auto", "hf"):
        try:
            wanted = detect_load_format(listing).load_format
        except LoadkitError:
            return []
    wanted = "pt" if wanted == "npcache" else wanted
    kinds = {wanted} if wanted in FORMAT_PATTERNS else {"safetensors"}
    return [info.name for info in listing if kind_of(info.name) in kinds]


def files_of_index(data: bytes, name: str) -> list[str]:
    """The weight files that an index names.

    Raises:
        LoadkitError: it is none.
    """
    index = parse_json(data, file=name, max_bytes=len(data))
    named = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(named, dict):
        raise IndexFileError(f"{show(name)} has no weight_map", file=name)
    return sorted({check_name(file) for file in named.values()})


def find_quant(names: Iterable[str], quant: str, repo: str) -> str:
    """The GGUF file, or the first part of one, that ``repo:quant`` means.

    Raises:
        NoWeightsError: none is named so, or several models are; lists what is there.
    """
    word = re.compile(rf"(?:^|[-._/]){re.escape(quant)}(?:[-._/]|$)", re.IGNORECASE)
    models: dict[str, str] = {}
    others: set[str] = set()
    for name in sorted(names):
        file = name.rpartition("/")[2]
        if not name.endswith(".gguf") or file.startswith("mmproj"):
            continue
        part = _PART.fullmatch(name)
        stem = part["stem"] if part else name.removesuffix(".gguf")
        if word.search(stem):
            models.setdefault(stem, name)
        else:
            others.add(stem.rpartition("/")[2])
    if len(models) == 1:
        return next(iter(models.values()))
    if models:
        raise NoWeightsError(
            f"{show(repo)} holds {len(models)} GGUF models named {show(quant)}: "
            + ", ".join(map(show, list(models.values())[:10])),
            code="E_AMBIGUOUS",
            detail={"files": list(models.values())},
            hint=f"name the file: hf://{repo}/FILE.gguf",
        )
    some = ", ".join(map(show, sorted(others)[:20])) if others else "none"
    raise NoWeightsError(
        f"{show(repo)} holds no GGUF file named {show(quant)}; it holds {some}",
        detail={"quant": quant, "files": sorted(others)},
        hint="give one of those after the colon" if others else "it is no GGUF repository",
    )


def parted(path: str) -> tuple[str, str]:
    """A file's folder, with the slash, and its name."""
    folder, slash, name = path.rpartition("/")
    return folder + slash, name


def belongs(name: str, single: str) -> bool:
    """Whether a file is the named one, or another part of the same split model."""
    if name == single:
        return True
    part, other = _PART.fullmatch(single), _PART.fullmatch(name)
    return bool(part and other and part.groups() == other.groups())
