"""A target before its first byte: which files it will have, what is in them, what lies beside."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadkit.conversion.contents import Contents
from loadkit.conversion.files import PlannedFile, digest, planned_files
from loadkit.conversion.journal import Done
from loadkit.conversion.outputs import BUDGET
from loadkit.entry_index import core_version
from loadkit.hf_config import MAX_CONFIG_BYTES, parse_config
from loadkit.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    TensorEntry,
    Topology,
    manifest_bytes,
)
from loadkit.origin import Origin
from loadkit.save_config import config_bytes, side_files
from loadkit.saved_files import INDEX, index_bytes, main_dtype, shard_name

if TYPE_CHECKING:
    from loadkit.readers.base import Reader
    from loadkit.resolve import Job
    from loadkit.sources.base import File

__all__ = [
    "Draft",
    "Small",
    "checkpoint_draft",
    "conversion_of",
    "file_entries",
    "own_config",
]


@dataclass(frozen=True, eq=False)
class Small:
    """The files beside the weights.

    Attributes:
        files: the source's own, open, by the name they get.
        made: content by name.
        not_copied: files of the source that could not be had, with the reason.
    """

    files: list[tuple[str, File]] = field(default_factory=list)
    made: dict[str, bytes] = field(default_factory=dict)
    not_copied: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Draft:
    """Everything that a conversion will write.

    Attributes:
        files: the weight files in order.
        readers: rank -> what reads for its files.
        contents: of each rank.
        small: the files beside them.
        last: from the weight files' digests: the files that make it whole, in order.
        layout: as a manifest calls it.
        topology: of the ranks.
    """

    files: list[PlannedFile]
    readers: dict[int, Reader]
    contents: list[Contents]
    small: Small
    last: Callable[[Mapping[str, Done]], dict[str, bytes]]
    layout: str = "checkpoint"
    topology: Topology = field(default_factory=Topology)

    @property
    def size(self) -> int:
        """Bytes of all files, but for the last ones."""
        small = sum(file.size for _, file in self.small.files)
        made = sum(map(len, self.small.made.values()))
        return sum(file.size for file in self.files) + small + made

    def sources(self) -> list[File]:
        """The source's files, each once."""
        found = {file.name: file for contents in self.contents for file in contents.files}
        return list(found.values())

    def check_unchanged(self) -> None:
        """Compare the source's files with what they were when they were opened.

        Raises:
            ChangedError: one was written to, replaced or removed.
        """
        for file in self.sources():
            file.check_unchanged()


def conversion_of(draft: Draft, target: Path) -> str:
    """What makes two runs the same conversion, as one word: plan, source and target."""
    return digest(
        {
            "version": core_version(),
            "budget": BUDGET,
            "target": target.name,
            "layout": draft.layout,
            "files": [
                (file.name, file.size, digest(file.layout.head.hex())) for file in draft.files
            ],
            "rows": [
                digest([row.to_dict() for row in contents.plan.rows]) if contents.plan else None
                for contents in draft.contents
            ],
            "source": sorted(_identity(file) for file in draft.sources()),
        }
    )


def _identity(file: File) -> list[Any]:
    """What changes when a file does; of a remote file its size is known."""
    if file.path is None:
        return [file.name, file.size]
    found = os.stat(file.path)  # noqa: PTH116
    return [file.name, found.st_size, found.st_ino, found.st_mtime_ns]


@contextmanager
def checkpoint_draft(
    job: Job,
    contents: Contents,
    *,
    metadata: Mapping[str, str],
    most: int,
    copies_config: bool,
) -> Iterator[Draft]:
    """A Hugging Face checkpoint: the weights, their index, config.json, and the tokenizer's files.

    Args:
        job: whose source it is.
        contents: what goes into the weight files.
        metadata: of each of them.
        most: as ``max_shard_bytes`` of ``loadkit.save``.
        copies_config: config.json is the source's, and not what a model was loaded with.
    """
    files = planned_files(contents.groups, shard_name, metadata, most)
    entries = [entry for file in files for entry in file.layout.entries]
    dtype = main_dtype(entries)
    origin = contents.origin or Origin(job.config)
    with side_files(origin) as (copied, refused):
        small = Small(list(copied), {}, dict(refused))
        config = own_config(job) if copies_config else contents.config
        if config is not None:
            kept = copies_config and not contents.casts
            small.made["config.json"] = config_bytes(
                config, dtype=None if kept else dtype, tied=bool(contents.ties)
            )

        def last(done: Mapping[str, Done]) -> dict[str, bytes]:
            found: dict[str, bytes] = {}
            if len(files) > 1:
                weight_map = {e.name: file.name for file in files for e in file.layout.entries}
                found[INDEX] = index_bytes(weight_map, sum(entry.nbytes for entry in entries))
            manifest = Manifest(
                "checkpoint",
                file_entries(files, done),
                dtype=dtype or "",
                architecture=origin.architecture,
                source=job.source_name,
                loadkit_version=core_version() or "",
            )
            return found | {MANIFEST: manifest_bytes(manifest)}

        yield Draft(files, {0: contents.reader}, [contents], small, last)


def own_config(job: Job) -> dict[str, Any] | None:
    """The values of the config.json beside a source's weights; None where there is none.

    Raises:
        ConfigFileError: E_CONFIG, it is no JSON object.
    """
    single = getattr(job.source, "single", None)
    if single is not None or all(info.name != "config.json" for info in job.source.list()):
        return None
    opened = job.source.open("config.json")
    data = opened.read(0, min(opened.size, MAX_CONFIG_BYTES + 1))
    return dict(parse_config(data, file="config.json"))


def file_entries(files: Sequence[PlannedFile], done: Mapping[str, Done]) -> dict[str, FileEntry]:
    """Weight files as a manifest lists them; ``done`` has their digests."""
    entries: dict[str, FileEntry] = {}
    for file in files:
        offsets, digests = file.offsets(), done[file.name].tensors
        tensors = {
            output.name: TensorEntry(
                entry.dtype,
                entry.shape,
                offsets[output.name],
                digests[output.name],
                output.row,
                output.rows,
            )
            for entry, output in zip(file.layout.entries, file.outputs, strict=True)
        }
        entries[file.name] = FileEntry(file.size, done[file.name].sha256, file.rank, tensors)
    return entries
