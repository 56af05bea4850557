"""What a folder of rank files holds: by its manifest, or, where it has none, by files' names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from loadkit.detect import no_weights
from loadkit.errors import ShardedError
from loadkit.file_checks import show
from loadkit.manifest import MANIFEST, FileEntry, Manifest, Topology, read_manifest
from loadkit.rank_files.unfinished import unfinished_problem
from loadkit.safetensors_format import read_header
from loadkit.tensor_info import TensorInfo
from loadkit_sharded_state.pattern import FilePattern
from loadkit_sharded_state.stored import Piece, Stored, joined

if TYPE_CHECKING:
    from loadkit.sources.base import FileInfo, Source

__all__ = ["Artefact", "open_artefact"]

_SHOWN = 10  # files or ranks in a message; all are in ``detail``


@dataclass(eq=False)
class Artefact:
    """Rank files that belong together.

    Attributes:
        source: where they are.
        topology: of the ranks that wrote them; without a manifest tp alone, counted from the files.
        files: of each rank, in order.
        manifest: what was written last; None: vLLM, or another program, wrote them.
    """

    source: Source
    topology: Topology
    files: dict[int, list[str]]
    manifest: Manifest | None = None
    _ranks: dict[int, dict[str, Stored]] = field(default_factory=dict)

    def tensors_of(self, rank: int) -> dict[str, Stored]:
        """A rank's parameters and buffers, from its files' headers, in file order.

        Raises:
            ShardedError: a file is not what the manifest says, or a tensor is not one whole.
            FormatError: a header breaks a rule.
        """
        if rank not in self._ranks:
            pieces: dict[str, list[Piece]] = {}
            for name in self.files[rank]:
                header = read_header(self.source.open(name))
                entry = None if self.manifest is None else self.manifest.files[name]
                if entry is not None:
                    _check_header(name, entry, header.tensors)
                for info in header.tensors:
                    pieces.setdefault(info.name, []).append(_piece(info, entry))
            self._ranks[rank] = joined(rank, pieces)
        return self._ranks[rank]


def _piece(info: TensorInfo, entry: FileEntry | None) -> Piece:
    if entry is None:
        return Piece(info)
    known = entry.tensors[info.name]
    return Piece(info, known.row, known.rows)


def open_artefact(source: Source, pattern: FilePattern) -> Artefact:
    """Find the rank files of a source and check that none is missing. Reads the manifest only.

    Args:
        source: an open source.
        pattern: what files are called where there is no manifest.

    Raises:
        NoWeightsError: no such file.
        ManifestError: the manifest is broken.
        ShardedError: E_SHARDED, files or ranks are missing, of another size, or a save was killed
            before it was done.
    """
    listing = source.list()
    manifest = read_manifest(source)
    if manifest is not None and manifest.layout != "checkpoint":
        return _by_manifest(source, manifest, listing)
    found: dict[int, dict[int, str]] = {}
    for info in listing:
        numbers = pattern.match(info.name)
        if numbers is not None:
            found.setdefault(numbers.rank, {})[numbers.part] = info.name
    if not found:
        problem = unfinished_problem(source, listing)
        if problem is not None:
            raise problem
        raise no_weights(listing, "sharded_state", [pattern.text])
    _check_complete(found, pattern)
    files = {rank: [found[rank][part] for part in sorted(found[rank])] for rank in sorted(found)}
    return Artefact(source, Topology(tp=len(files)), files)


def _check_complete(found: dict[int, dict[int, str]], pattern: FilePattern) -> None:
    """Ranks and parts are counted from 0 without gaps.

    A last rank or part that is missing cannot be seen from names: coverage sees it.
    """
    missing_ranks = sorted(set(range(max(found) + 1)) - set(found))
    missing = [
        pattern.name(rank, part)
        for rank, parts in sorted(found.items())
        for part in sorted(set(range(max(parts) + 1)) - set(parts))
    ]
    if not missing_ranks and not missing:
        return
    said = []
    if missing_ranks:
        there = _some(map(str, sorted(found)))
        absent = _some(map(str, missing_ranks))
        said.append(f"of {max(found) + 1} ranks {absent} missing: there are files of {there}")
    if missing:
        said.append(f"missing: {_some(map(show, missing))}")
    raise ShardedError(
        "; ".join(said),
        file=missing[0] if missing else pattern.name(missing_ranks[0], 0),
        detail={"missing_ranks": missing_ranks, "missing_files": missing},
        hint="copy the missing files, or save the model again",
    )


def _by_manifest(source: Source, manifest: Manifest, listing: Sequence[FileInfo]) -> Artefact:
    world = manifest.topology.world_size
    sizes = {info.name: info.size for info in listing}
    missing = [name for name in manifest.files if name not in sizes]
    whole = {entry.rank for entry in manifest.ranks} - {manifest.files[n].rank for n in missing}
    ranks = sorted(set(range(world)) - whole)
    if missing or ranks:
        raise ShardedError(
            f"{MANIFEST} names {world} rank(s) ({manifest.topology}); of rank(s) "
            f"{_some(map(str, ranks))} missing: {_some(map(show, missing)) or 'everything'}",
            file=missing[0] if missing else MANIFEST,
            detail={"missing_ranks": ranks, "missing_files": missing},
            hint="copy the missing files, or save the model again",
        )
    for name, entry in manifest.files.items():
        if sizes[name] != entry.size:
            raise ShardedError(
                f"{show(name)} has {sizes[name]} bytes; {MANIFEST} says {entry.size}",
                file=name,
                tensor=_at(entry, sizes[name]),
                offset=min(entry.size, sizes[name]),
                detail={"expected": entry.size, "actual": sizes[name]},
                hint="the file is not of this save, or was cut short; copy it again",
            )
    files: dict[int, list[str]] = {rank: [] for rank in range(world)}
    for name, entry in manifest.files.items():
        if entry.rank >= world:
            raise ShardedError(
                f"{MANIFEST}: {show(name)} is of rank {entry.rank}, and there are {world}",
                file=MANIFEST,
                detail={"rank": entry.rank, "world_size": world},
            )
        files[entry.rank].append(name)
    return Artefact(source, manifest.topology, files, manifest)


def _at(entry: FileEntry, offset: int) -> str | None:
    """The last tensor of a file that begins before an offset."""
    starts = [(one.offset, key) for key, one in entry.tensors.items() if one.offset < offset]
    return max(starts)[1] if starts else None


def _check_header(name: str, entry: FileEntry, tensors: Iterable[TensorInfo]) -> None:
    """A file's header is the one that the manifest was written with."""
    found = {info.name: (info.dtype, info.shape, info.offset) for info in tensors}
    expected = {key: (one.dtype, one.shape, one.offset) for key, one in entry.tensors.items()}
    if found == expected:
        return
    tensor = min(
        key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key)
    )
    raise ShardedError(
        f"{show(name)} is not the file that {MANIFEST} describes: tensor {show(tensor)} is "
        f"{_said(found.get(tensor))} in it, and should be {_said(expected.get(tensor))}",
        file=name,
        tensor=tensor,
        hint="the file is of another save; copy it again, or save the model again",
    )


def _said(place: tuple[str, tuple[int, ...], int] | None) -> str:
    return "missing" if place is None else f"{place[0]} {list(place[1])} at byte {place[2]}"


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    shown = ", ".join(listed[:_SHOWN])
    return shown if len(listed) <= _SHOWN else f"{shown} and {len(listed) - _SHOWN} more"
