"""Which files a load reads, and what is known of the ranks that they are of."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from loadkit.detect import FORMAT_PATTERNS, matching_formats, no_weights
from loadkit.errors import OptionError, ShardedError
from loadkit.file_checks import show, show_path
from loadkit.manifest import MANIFEST, Manifest, Topology, read_manifest
from loadkit.sources.joint import JointSource
from loadkit.sources.local import LocalSource
from loadkit_tensorizer.uri import FileName, parse_uri

if TYPE_CHECKING:
    from loadkit.config import LoadConfig
    from loadkit.sources.base import Source

__all__ = ["SUFFIX", "Found", "find"]

SUFFIX = ".tensors"
_DEFAULT = "model.tensors"
_RANK = re.compile(r"(.*[^0-9])([0-9]{2,9})(\.tensors)")
_SHOWN = 10  # files in a message


@dataclass(frozen=True)
class Found:
    """What a load reads.

    Attributes:
        source: what its files are opened from.
        names: files of the source; none where a URI is read.
        uri: of this rank, where one is read; else empty.
        manifest: of the folder, if it is of rank files.
        per_rank: the file holds what this rank holds, under the model's own names.
        skipped: files that are not read, with the reason.
    """

    source: Source
    names: tuple[str, ...]
    uri: str = ""
    manifest: Manifest | None = None
    per_rank: bool = False
    skipped: Mapping[str, str] = field(default_factory=dict)


def find(source: Source, load_config: LoadConfig, given: str | None, asked: Topology,
         rank: int) -> Found:  # fmt: skip
    """Choose the files of a load.

    Args:
        source: the open source.
        load_config: of the load.
        given: ``tensorizer_uri``, or None.
        asked: the topology that is loaded.
        rank: whose files are wanted.

    Raises:
        OptionError: a URI that cannot be.
        NoWeightsError: there is no such file.
        ShardedError: a rank's file is missing, or the files are of another topology.
    """
    name = None if given is None else parse_uri(given)
    if name is not None and name.scheme:
        return Found(source, (), name.of(rank), per_rank=name.per_rank)
    if name is not None and name.folder:
        source = _with_folder(source, load_config, name)
    listing = source.list()
    names = [info.name for info in listing]
    manifest = read_manifest(source)
    if manifest is not None and manifest.layout == "checkpoint":
        manifest = None
    if name is None:
        name = _detected(names, manifest)
        if name is None:
            raise no_weights(listing, "tensorizer", FORMAT_PATTERNS["tensorizer"])
    if not name.per_rank:
        _check_whole(name, names, manifest)
        if name.name not in names:
            raise no_weights(listing, "tensorizer", [name.name])
        skipped = {
            other: f"{name.name} is read"
            for other in matching_formats(names).get("tensorizer", ())
            if other != name.name
        }
        return Found(source, (name.name,), skipped=skipped)
    pattern = FileName(name.name, width=name.width)
    if manifest is None and all(pattern.rank_of(one) is None for one in names):
        raise no_weights(listing, "tensorizer", [pattern.text])
    _check_ranks(pattern, names, manifest, asked)
    return Found(source, (pattern.of(rank),), "", manifest, True)


def _with_folder(source: Source, load_config: LoadConfig, name: FileName) -> Source:
    """The source, and the files of another folder among its own."""
    if isinstance(source, LocalSource) and Path(source.root) == Path(name.folder).resolve():
        return source
    if isinstance(source, JointSource):  # of another rank of the same load
        return source
    second = LocalSource(name.folder, replace(load_config, subfolder=None))
    return JointSource(source, second, lambda one: one.endswith(SUFFIX) or one == MANIFEST)


def _detected(names: Sequence[str], manifest: Manifest | None) -> FileName | None:
    """The file, or the pattern of files, that a folder holds."""
    found = matching_formats(names).get("tensorizer", [])
    if manifest is not None:
        found = [name for name in manifest.files if name.endswith(SUFFIX)]
    elif _DEFAULT in found:
        return FileName(_DEFAULT)
    patterns: dict[tuple[str, int, str], list[str]] = {}
    for name in found:
        parts = _RANK.fullmatch(name)
        if parts is not None:
            patterns.setdefault((parts[1], len(parts[2]), parts[3]), []).append(name)
    if len(patterns) == 1 and len(next(iter(patterns.values()))) == len(found):
        head, width, tail = next(iter(patterns))
        if manifest is not None or len(found) > 1 or "rank" in head:
            return FileName(f"{head}%0{width}d{tail}", width=width)
    if len(found) > 1:
        shown = ", ".join(map(show, found[:_SHOWN]))
        raise OptionError(
            f"there are {len(found)} files, and nothing says which: {shown}",
            detail={"files": list(found)},
            hint="name one as tensorizer_uri in model_loader_extra_config",
        )
    return FileName(found[0]) if found else None


def _check_whole(name: FileName, names: Sequence[str], manifest: Manifest | None) -> None:
    """A file of one rank is not taken for the whole model."""
    entry = None if manifest is None else manifest.files.get(name.name)
    if manifest is None or entry is None:
        return
    raise ShardedError(
        f"{show(name.name)} is of rank {entry.rank} of {manifest.topology.world_size} "
        f"({manifest.topology}), not of the whole model",
        file=name.name,
        detail={"rank": entry.rank, "world_size": manifest.topology.world_size},
        hint="put %03d where the rank's number is in tensorizer_uri, or leave it out",
    )


def _check_ranks(
    pattern: FileName, names: Sequence[str], manifest: Manifest | None, asked: Topology
) -> None:
    """Every rank's file is there, and they are of the topology that is loaded.

    Raises:
        ShardedError: names the files that are missing, and the world that they were written for.
    """
    there = {rank for one in names if (rank := pattern.rank_of(one)) is not None}
    if manifest is not None:
        world, who = manifest.topology.world_size, f"{MANIFEST} says so"
    elif max(there, default=0) >= asked.world_size:
        world, who = max(there) + 1, "the files' names say so"
    else:
        world, who = asked.world_size, "that is what is loaded"
    missing = [pattern.of(rank) for rank in sorted(set(range(world)) - there)]
    if missing:
        shown = ", ".join(map(show, missing[:_SHOWN]))
        raise ShardedError(
            f"of {world} rank(s) ({who}) {len(missing)} have no file: missing {shown}",
            file=missing[0],
            detail={"missing_files": missing, "world_size": world},
            hint="copy the missing files, or save the model again",
        )
    saved = Topology(tp=world) if manifest is None else manifest.topology
    if saved != asked if manifest is not None else world != asked.world_size:
        raise ShardedError(
            f"the files {show_path(pattern.text)} were written by {world} rank(s) ({saved}), "
            f"and the load is of {asked.world_size} ({asked})",
            file=pattern.of(0),
            detail={"saved": str(saved), "asked": str(asked), "world_size": world},
            hint=f"load them at {saved}; a whole-model file can be loaded at any topology",
        )
