"""Saving a model as its ranks hold it: each rank its files, one of them the manifest."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from loadkit.config import ParallelConfig
from loadkit.finish import check_ready
from loadkit.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    Topology,
    manifest_bytes,
    parse_manifest,
)
from loadkit.manifest_merge import merge_manifests
from loadkit.origin import Origin, origin_of
from loadkit.rank_files.contents import Contents, contents_of
from loadkit.rank_files.folder import RankFolder
from loadkit.rank_files.ranks import Ranks
from loadkit.rank_files.unfinished import rank_manifest_name, rank_of_manifest
from loadkit.save import SaveReport, file_blocks
from loadkit.save_config import config_bytes, config_of, side_files
from loadkit.saved_files import is_replaced
from loadkit.text import printable

if TYPE_CHECKING:
    from torch import nn

__all__ = ["RankWriter", "save_rank"]

log = logging.getLogger("loadkit")


class RankWriter(Protocol):
    """A format's part of a save by ranks."""

    def rank_of(self, name: str) -> int | None:
        """Whose weight file a name is; None: it is none of this format's."""

    def write(self, folder: RankFolder, rank: int, contents: Contents) -> dict[str, FileEntry]:
        """Create all weight files of one rank; their names, and what the manifest says of each."""


def save_rank(
    model: nn.Module,
    path: str | os.PathLike[str],
    writer: RankWriter,
    *,
    save_id: str = "",
    config: Any = None,
) -> SaveReport:
    """Write one rank's part of a model; the last rank puts everything in place.

    Args:
        model: loaded or built by loadkit, or any module: all of it, or one rank's part.
        path: the folder, the same for all ranks.
        writer: what the weight files are called and how they are written.
        save_id: one word for the ranks of one save, where they are processes of no group.
        config: as of ``loadkit.save``.

    Raises:
        LoadkitError: see ``loadkit.save``; the folder is as it was.
    """
    started = time.perf_counter()
    origin = origin_of(model)
    parallel = ParallelConfig() if origin is None else origin.config.parallel_config
    topology = Topology.of(parallel)
    ranks = Ranks(path, topology, parallel.world_size, save_id)
    job = _Save(model, origin, topology, writer, config)
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
        writer: RankWriter,
        config: Any,
    ) -> None:
        self.model, self.origin, self.topology = model, origin, topology
        self.writer, self.config = writer, config
        self.contents: Contents | None = None
        self.files: dict[str, FileEntry] = {}
        self.copied: list[str] = []
        self.refused: dict[str, str] = {}

    def replaces(self, name: str) -> bool:
        """Whether a file of the old folder belongs to what is replaced."""
        return is_replaced(name) or self.writer.rank_of(name) is not None

    def write(self, folder: RankFolder) -> None:
        """This rank's files, then its manifest."""
        check_ready(self.model)
        self.contents = contents = contents_of(self.model, self.origin, self.topology)
        rank = contents.manifest.ranks[0].rank
        self._remove_earlier(folder, rank)
        self.files = self.writer.write(folder, rank, contents)
        manifest = replace(contents.manifest, files=self.files)
        folder.publish(rank_manifest_name(rank), manifest_bytes(manifest))

    def _remove_earlier(self, folder: RankFolder, rank: int) -> None:
        """What this rank left in an earlier try of the same save; its manifest goes first."""
        folder.remove(rank_manifest_name(rank))
        for name in folder.listed():
            if self.writer.rank_of(name) == rank:
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
