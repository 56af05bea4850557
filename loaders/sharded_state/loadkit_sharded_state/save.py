"""Saving a model as its ranks hold it: each rank its files, one of them the manifest."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadkit.config import ParallelConfig
from loadkit.finish import check_ready
from loadkit.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    TensorEntry,
    Topology,
    manifest_bytes,
    parse_manifest,
)
from loadkit.manifest_merge import merge_manifests
from loadkit.options import validate_extra_config
from loadkit.origin import Origin, origin_of
from loadkit.safetensors_writer import (
    Entry,
    check_metadata,
    entry_of,
    lay_out_file,
    write_safetensors,
)
from loadkit.save import SaveReport, file_blocks
from loadkit.save_config import config_bytes, config_of, side_files
from loadkit.saved_files import MAX_SHARD_BYTES, is_replaced, split_shards
from loadkit.text import printable
from loadkit_sharded_state.contents import Contents, contents_of
from loadkit_sharded_state.folder import RankFolder
from loadkit_sharded_state.hashing import HashingSink
from loadkit_sharded_state.pattern import FilePattern
from loadkit_sharded_state.ranks import Ranks
from loadkit_sharded_state.unfinished import rank_manifest_name, rank_of_manifest

if TYPE_CHECKING:
    import torch
    from torch import nn

    from loadkit.options import OptionSpec

__all__ = ["save_rank"]

log = logging.getLogger("loadkit")


@dataclass(frozen=True)
class _Cut:
    """An entry of a file, and which rows of its parameter it is."""

    entry: Entry
    row: int = 0
    rows: int | None = None


def save_rank(
    model: nn.Module,
    path: str | os.PathLike[str],
    options: Mapping[str, OptionSpec],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    config: Any = None,
    metadata: Mapping[str, str] | None = None,
    extra_config: Mapping[str, Any] | None = None,
) -> SaveReport:
    """Write one rank's part of a model; the last rank puts everything in place.

    Args:
        model: loaded or built by loadkit, or any module: all of it, or one rank's part.
        path: the folder, the same for all ranks.
        options: what ``extra_config`` may hold.
        max_shard_bytes: most bytes of tensors in one file; a larger parameter is cut into rows.
        config, metadata: as of ``loadkit.save``.
        extra_config: ``pattern``, ``save_id``.

    Raises:
        LoadkitError: see ``loadkit.save``; the folder is as it was.
    """
    started = time.perf_counter()
    given = validate_extra_config(options, extra_config or {}, "sharded_state")
    pattern = FilePattern(str(given["pattern"]))
    origin = origin_of(model)
    parallel = ParallelConfig() if origin is None else origin.config.parallel_config
    topology = Topology.of(parallel)
    ranks = Ranks(path, topology, parallel.world_size, str(given["save_id"]))
    job = _Save(model, origin, topology, pattern, max_shard_bytes, config, metadata or {})
    writes = parallel.rank < topology.world_size  # others hold the same as one that does
    with RankFolder(path, ranks.save_id, lambda name: job.replaces(name)) as folder:
        try:
            if writes:
                job.write(folder)
        except BaseException as error:
            ranks.share(error)
            raise
        ranks.share(None)
        missing: tuple[int, ...] = ()
        try:
            if parallel.rank == 0 if ranks.together else writes:
                missing = job.commit(folder)
        except BaseException as error:
            ranks.share(error)
            raise
        ranks.share(None)
        folder.names = []  # they are in place, or wait for the other ranks
    if missing:
        log.info("%s is not complete: ranks %s are to come", printable(path), missing)
    else:
        ranks.done()
    return job.report(Path(path), missing, time.perf_counter() - started)


class _Save:
    def __init__(
        self,
        model: nn.Module,
        origin: Origin | None,
        topology: Topology,
        pattern: FilePattern,
        most: int,
        config: Any,
        metadata: Mapping[str, str],
    ) -> None:
        self.model, self.origin, self.topology = model, origin, topology
        self.pattern, self.most, self.config = pattern, most, config
        self.header = check_metadata(metadata)
        self.contents: Contents | None = None
        self.files: dict[str, FileEntry] = {}
        self.copied: list[str] = []
        self.refused: dict[str, str] = {}

    def replaces(self, name: str) -> bool:
        """Whether a file of the old folder belongs to what is replaced."""
        return is_replaced(name) or self.pattern.match(name) is not None

    def write(self, folder: RankFolder) -> None:
        """This rank's files, then its manifest."""
        check_ready(self.model)
        self.contents = contents = contents_of(self.model, self.origin, self.topology)
        rank = contents.manifest.ranks[0].rank
        self._remove_earlier(folder, rank)
        with ThreadPoolExecutor(2, "loadkit-hash") as pool:
            for part, cuts in enumerate(_files(contents.tensors, self.most)):
                name = self.pattern.name(rank, part)
                with folder.create(name) as out:
                    self.files[name] = _write(HashingSink(out, pool), rank, cuts, self.header)
        manifest = replace(contents.manifest, files=self.files)
        folder.publish(rank_manifest_name(rank), manifest_bytes(manifest))

    def _remove_earlier(self, folder: RankFolder, rank: int) -> None:
        """What this rank left in an earlier try of the same save; its manifest goes first."""
        folder.remove(rank_manifest_name(rank))
        for name in folder.listed():
            numbers = self.pattern.match(name)
            if numbers is not None and numbers.rank == rank:
                folder.remove(name)

    def commit(self, folder: RankFolder) -> tuple[int, ...]:
        """Put everything in place if all ranks are done; returns those that are not."""
        missing: tuple[int, ...] = ()

        def finish() -> list[str] | None:
            nonlocal missing
            found = {
                rank: name
                for name in folder.listed()
                if (rank := rank_of_manifest(name)) is not None
            }
            missing = tuple(sorted(set(range(self.topology.world_size)) - set(found)))
            if missing:
                return None
            manifests = [
                parse_manifest(folder.read(name), file=name) for _, name in sorted(found.items())
            ]
            names = self._finish(folder, merge_manifests(manifests))
            for name in folder.listed():
                if name not in names:
                    folder.remove(name)
            return names

        folder.commit(finish)
        return missing

    def _finish(self, folder: RankFolder, manifest: Manifest) -> list[str]:
        """The files beside the weights, and last the manifest; returns all names, in order."""
        own = len(folder.names)
        values = config_of(self.model, self.config, self.origin)
        with side_files(self.origin) as (files, self.refused):
            for name, file in files:
                with folder.create(name) as out:
                    for block in file_blocks(file):
                        out.write(block)
            self.copied = [name for name, _ in files]
        if values is not None:
            with folder.create("config.json") as out:
                out.write(config_bytes(values, dtype=manifest.dtype or None, tied=False))
        with folder.create(MANIFEST) as out:
            out.write(manifest_bytes(manifest))
        return [*manifest.files, *folder.names[own:]]

    def report(self, path: Path, missing: tuple[int, ...], seconds: float) -> SaveReport:
        """What this rank wrote."""
        tensors = {} if self.contents is None else self.contents.tensors
        return SaveReport(
            path=path,
            files=tuple(self.files),
            tensors=len(tensors),
            total_size=sum(tensor.nbytes for tensor in tensors.values()),
            ties={} if self.contents is None else self.contents.tied,
            copied=tuple(self.copied),
            not_copied=dict(self.refused),
            seconds=seconds,
            missing_ranks=missing,
        )


def _files(tensors: Mapping[str, torch.Tensor], most: int) -> Iterator[list[_Cut]]:
    """Tensors in files of at most ``most`` bytes, in order; a larger one is cut into rows."""
    cuts = [cut for name, tensor in tensors.items() for cut in _cuts(name, tensor, most)]
    by_entry = {id(cut.entry): cut for cut in cuts}
    for shard in split_shards([[cut.entry] for cut in cuts], most):
        yield [by_entry[id(entry)] for entry in shard]


def _cuts(name: str, tensor: torch.Tensor, most: int) -> Iterator[_Cut]:
    if tensor.nbytes <= most or tensor.dim() == 0 or tensor.shape[0] < 2:
        yield _Cut(entry_of(name, tensor))
        return
    rows = tensor.shape[0]
    step = max(1, most * rows // tensor.nbytes)
    for start in range(0, rows, step):
        part = tensor.narrow(0, start, min(step, rows - start))
        yield _Cut(entry_of(name, part), start, rows)


def _write(out: HashingSink, rank: int, cuts: list[_Cut], metadata: Mapping[str, str]) -> FileEntry:
    entries = [cut.entry for cut in cuts]
    layout = lay_out_file(entries, metadata)
    write_safetensors(out, entries, metadata)
    rows = {cut.entry.name: cut for cut in cuts}
    tensors: dict[str, TensorEntry] = {}
    at = len(layout.head)
    for entry in layout.entries:
        cut = rows[entry.name]
        tensors[entry.name] = TensorEntry(
            entry.dtype, entry.shape, at, out.tensor(entry.name), cut.row, cut.rows
        )
        at += entry.nbytes
    return FileEntry(layout.size, out.sha256, rank, tensors)
