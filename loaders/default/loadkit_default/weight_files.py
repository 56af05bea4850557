"""Which files of a source hold the weights, why those, and why not the others.

Rules, in order:

1. A single file that was named as the source is the weights, a variant too; an adapter is not.
2. With an index, exactly the files that it names (``ignore_index`` opts out).
3. Without one, ``model*.safetensors`` before others: ``model.safetensors``, or the one complete
   set of ``model-N-of-M.safetensors``; two complete sets are refused. The archives of
   ``torch.save`` are called ``pytorch_model*.bin`` there.
4. Otherwise every other file of the pattern.

``allow_patterns_overrides`` is in place of all of that: every file that fits, in folders too where
a pattern names them (``weights/*.safetensors``), but adapters and training state only by their
whole names. ``ignore_patterns`` goes before it. Patterns are those of ``loadkit.file_patterns``.

``hf`` takes archives (``.bin``, ``.pt``, ``.pth``) where there are no safetensors, and never mixes.

Variants, adapters, training state, rank files of ``sharded_state`` and, unless ``mistral`` is
asked for, ``consolidated*`` are never taken by themselves.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from loadkit.detect import FORMAT_PATTERNS, formats_of, kind_of, no_weights
from loadkit.errors import IndexFileError
from loadkit.file_checks import show
from loadkit.file_patterns import first_fit
from loadkit_default.weight_index import Header, index_problems, read_index, report

if TYPE_CHECKING:
    from loadkit.config import LoadConfig
    from loadkit.sources.base import FileInfo, Source

__all__ = ["PATTERNS", "WeightFiles", "check_against_index", "find_weight_files"]

logger = logging.getLogger(__name__)

# What each load format reads. `hf` also covers .bin where there are no safetensors.
PATTERNS: dict[str, tuple[str, ...]] = {
    "hf": ("*.safetensors",),
    "safetensors": ("*.safetensors",),
    "mistral": ("consolidated*.safetensors",),
    "pt": FORMAT_PATTERNS["pt"],
}
# Load format -> the kind of its files, and what a model saved by its writers is called.
_KINDS = {"mistral": "mistral", "pt": "pt"}
_NAMES = {"mistral": "consolidated.safetensors", "pt": "pytorch_model.bin"}
# Files that are read where they are named whole, and by no pattern.
_NEVER_BY_PATTERN = ("training", "adapter")
_SHARD = re.compile(
    r"(?P<stem>.+?)-(?P<number>\d{1,6})-of-(?P<total>\d{1,6})\.(?P<suffix>safetensors|bin|pt|pth)"
)
_KIND_REASONS = {
    "training": "training state",
    "variant": "a variant: name the file to use it",
    "adapter": "an adapter, not a model",
    "mistral": "Mistral's own tensor names: read by load_format='mistral'",
    "sharded_state": "one rank's part: read by load_format='sharded_state'",
    "safetensors": "not of this load format",
    "pt": "safetensors go first",
    "gguf": "read by load_format='gguf'",
    "tensorizer": "read by load_format='tensorizer'",
    "dcp": "read by load_format='dcp'",
}


@dataclass(frozen=True)
class WeightFiles:
    """The choice.

    Attributes:
        files: names of the files that hold the weights, in name order.
        skipped: every other weight file of the root, with the reason.
        index: the index's ``{tensor: file}``, or None where none counts.
        why: one sentence for people.
        index_file: the index's own name, "" without one.
    """

    files: list[str]
    skipped: dict[str, str]
    index: dict[str, str] | None
    why: str
    index_file: str = ""


@dataclass
class _Search:
    """One search: what is left to choose from, and what was put aside."""

    source: Source
    load_config: LoadConfig
    load_format: str
    patterns: tuple[str, ...]
    listing: Sequence[FileInfo]
    candidates: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The kind of file that is looked for."""
        return _KINDS.get(self.load_format, "safetensors")

    @property
    def name(self) -> str:
        """What the one file of a model is called, by those who write this format."""
        return _NAMES.get(self.load_format, "model.safetensors")

    def choose(self, files: Iterable[str], why: str, reason: str) -> WeightFiles:
        """These files; every other candidate is skipped with the reason."""
        chosen = sorted(files)
        for name in self.candidates:
            if name not in chosen:
                self.skipped.setdefault(name, reason)
        return WeightFiles(chosen, dict(sorted(self.skipped.items())), None, why)


def find_weight_files(source: Source, load_config: LoadConfig, load_format: str) -> WeightFiles:
    """Choose the files, by the rules at the top. Only the index is read.

    Args:
        source: an open source.
        load_config: ``ignore_patterns``, ``allow_patterns_overrides`` and ``ignore_index`` count.
        load_format: ``hf``, ``safetensors``, ``mistral`` or ``pt`` (``auto`` is taken as ``hf``).

    Raises:
        NoWeightsError: nothing matches; lists patterns, files seen, formats that would match and
            sub-folders with weights.
        IndexFileError: the index is broken or does not fit the files, or a shard is missing, or
            two sets of files could be meant.
    """
    listing = source.list()
    single = getattr(source, "single", None)
    load_format = "hf" if load_format == "auto" else load_format
    if load_format == "hf" and _falls_back(listing, load_config, single):
        load_format = "pt"
    patterns = load_config.allow_patterns_overrides or PATTERNS[load_format]
    search = _Search(source, load_config, load_format, tuple(patterns), listing)
    if single is not None:
        name = single.rpartition("/")[2]
        if kind_of(name) == "adapter" or first_fit(name, search.patterns) is None:
            raise no_weights(search.listing, load_format, search.patterns)
        found = WeightFiles([single], {}, None, "the file that was named")
    else:
        _sort_out(search)
        found = _from_index(search) or _from_names(search)
    logger.info("weights: %s (%s)", ", ".join(map(show, found.files)), found.why)
    for name, reason in found.skipped.items():
        logger.info("not read: %s (%s)", show(name), reason)
    return found


def check_against_index(headers: Iterable[Header], weight_files: WeightFiles) -> None:
    """Hold the files' headers against the index, if one counts.

    Raises:
        IndexFileError: lists every tensor that no file holds, that another file holds, or that
            the index omits.
    """
    if weight_files.index is None:
        return
    problems = index_problems(weight_files.index, headers)
    if problems:
        raise report(weight_files.index_file, problems)


def _falls_back(listing: Sequence[FileInfo], load_config: LoadConfig, single: str | None) -> bool:
    """Whether ``hf`` reads archives: there are some, no safetensors, and it may."""
    if not load_config.fall_back_to_pt or load_config.allow_patterns_overrides is not None:
        return False
    if single is not None:
        return "pt" in formats_of(single.rpartition("/")[2])
    ignored = load_config.ignore_patterns
    names = [info.name for info in listing if first_fit(info.name, ignored) is None]
    kinds = {kind_of(name) for name in names}
    indexed = "model.safetensors.index.json" in names  # its files are missing: that is said
    return "pt" in kinds and "safetensors" not in kinds and not indexed


def _sort_out(search: _Search) -> None:
    """Candidates are the files of the patterns; the root's others are skipped with their reason."""
    overridden = search.load_config.allow_patterns_overrides is not None
    for name in (info.name for info in search.listing):
        kind = kind_of(name.rpartition("/")[2])
        fit = first_fit(name, search.patterns)
        if kind is None or ("/" in name and fit is None):
            continue
        ignored = first_fit(name, search.load_config.ignore_patterns)
        if ignored is not None:
            search.skipped[name] = f"ignore_patterns has {ignored!r}"
        elif fit is None or (kind in _NEVER_BY_PATTERN and fit != name):
            search.skipped[name] = _KIND_REASONS[kind]
        elif kind == search.kind or overridden:
            search.candidates.append(name)
        else:
            search.skipped[name] = _KIND_REASONS[kind]


# -- with an index -------------------------------------------------------------------------------


def _from_index(search: _Search) -> WeightFiles | None:
    """What the index names, or None where no index counts."""
    name = _index_name(search)
    if name is None or search.load_config.allow_patterns_overrides is not None:
        return None
    if search.load_config.ignore_index:
        logger.info("not read: %s (ignore_index)", show(name))
        return None
    index = read_index(
        search.source.open(name), FORMAT_PATTERNS["pt" if search.kind == "pt" else "safetensors"]
    )
    files = sorted(set(index.values()))
    _check_files(search, name, files)
    found = search.choose(files, f"named by {name}", f"not named by {name}")
    for file in files:
        found.skipped.pop(file, None)
    return WeightFiles(found.files, found.skipped, index, found.why, name)


def _index_name(search: _Search) -> str | None:
    """The index that counts: the standard name, or the only one of another stem."""
    wanted = f"{search.name}.index.json"
    ignored = search.load_config.ignore_patterns
    names = [info.name for info in search.listing if "/" not in info.name]
    names = [name for name in names if first_fit(name, ignored) is None]
    if wanted in names:
        return wanted
    others = [
        name
        for name in names
        if name.endswith(".index.json") and kind_of(name.removesuffix(".index.json")) == search.kind
    ]
    return others[0] if len(others) == 1 and search.load_format != "mistral" else None


def _check_files(search: _Search, index: str, files: Sequence[str]) -> None:
    """Every named file is there, and no shard of the same set is left out."""
    present = {info.name for info in search.listing}
    missing = [name for name in files if name not in present]
    problems = [f"{show(name)} is named and missing" for name in missing]
    sets = {(m["stem"], m["total"]) for name in files if (m := _SHARD.fullmatch(name))}
    unlisted = [
        name
        for name in search.candidates
        if name not in files and (m := _SHARD.fullmatch(name)) and (m["stem"], m["total"]) in sets
    ]
    problems += [f"{show(name)} is there and not named" for name in unlisted]
    patterns = {name: first_fit(name, search.load_config.ignore_patterns) for name in files}
    ignored = [name for name in files if name not in missing and patterns[name] is not None]
    problems += [
        f"{show(name)} is named, and ignore_patterns has {patterns[name]!r}" for name in ignored
    ]
    if not problems:
        return
    on_disk = [name for name in search.candidates if name not in files]
    hint = "download the missing files"
    if missing and on_disk:
        problems.append("on disk are " + ", ".join(map(show, on_disk[:10])))
        hint += ", or set ignore_index=true to read those that are on disk"
    elif ignored:
        hint = "a model is all of its files: take the pattern out of ignore_patterns"
    elif not missing:
        hint = "fix the index, or set ignore_index=true to read all shards"
    error = report(index, problems, hint)
    error.detail.update(missing=missing, unlisted=unlisted, on_disk=on_disk, ignored=ignored)
    raise error


# -- without an index ----------------------------------------------------------------------------


def _from_names(search: _Search) -> WeightFiles:
    """The choice by names alone."""
    names = search.candidates
    if not names:
        raise no_weights(search.listing, search.load_format, search.patterns)
    if search.load_config.allow_patterns_overrides is not None:
        return search.choose(names, "all that match allow_patterns_overrides", "")
    single = search.name
    stem = single.partition(".")[0]
    complete, broken = _shard_sets([name for name in names if name.startswith(stem)])
    sets = [*complete, *([[single]] if single in names else [])]
    if len(sets) > 1:
        raise IndexFileError(
            "no index, and more than one set of files could be the weights: "
            + "; ".join(", ".join(map(show, files[:3])) for files in sets),
            detail={"sets": sets},
            hint="name the right ones in allow_patterns_overrides, or add the index",
        )
    if len(sets) == 1:
        what = single if sets[0] == [single] else f"the complete set of {len(sets[0])} shards"
        return search.choose(sets[0], f"no index; {what}", f"{what} goes first")
    if broken:
        raise _incomplete(broken)
    preferred = [name for name in names if name.startswith(stem)]
    if preferred:
        return search.choose(preferred, f"no index; all {stem}*", f"{stem}* goes first")
    complete, broken = _shard_sets(names)
    if broken:
        raise _incomplete(broken)
    return search.choose(names, "no index; all that match", "")


def _shard_sets(names: Sequence[str]) -> tuple[list[list[str]], dict[str, list[int]]]:
    """Sets of ``stem-N-of-M``: the complete ones, and of the others which numbers are missing."""
    sets: dict[tuple[str, str, str], dict[int, str]] = {}
    for name in names:
        match = _SHARD.fullmatch(name)
        if match:
            kind = match["stem"], match["total"], match["suffix"]
            sets.setdefault(kind, {})[int(match["number"])] = name
    complete: list[list[str]] = []
    broken: dict[str, list[int]] = {}
    for (stem, total, suffix), found in sorted(sets.items()):
        first = 0 if 0 in found else 1
        numbers = range(first, int(total) + first)
        missing = [number for number in numbers if number not in found]
        if missing:
            broken[f"{stem}-?-of-{total}.{suffix}"] = missing
        else:
            complete.append([found[number] for number in sorted(found)])
    return complete, broken


def _incomplete(broken: dict[str, list[int]]) -> IndexFileError:
    pattern, numbers = next(iter(broken.items()))
    some = ", ".join(map(str, numbers[:10])) + (" ..." if len(numbers) > 10 else "")
    return IndexFileError(
        f"shards of {show(pattern)} are missing: {some}",
        detail={"missing": broken},
        hint="download the missing files",
    )
