"""One file of a target before it is written: its name, its first bytes, its tensors in order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadkit.conversion.outputs import Output
from loadkit.safetensors_writer import FileLayout, lay_out_file
from loadkit.saved_files import split_shards

__all__ = ["PlannedFile", "digest", "planned_files"]


@dataclass(frozen=True, eq=False)
class PlannedFile:
    """A safetensors file to write: ``outputs`` are in the order of ``layout.entries``."""

    name: str
    layout: FileLayout
    outputs: tuple[Output, ...]
    rank: int = 0

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.layout.size

    def offsets(self) -> dict[str, int]:
        """Where each tensor begins, by name, in bytes of the file."""
        found: dict[str, int] = {}
        at = len(self.layout.head)
        for entry in self.layout.entries:
            found[entry.name] = at
            at += entry.nbytes
        return found


def planned_files(
    groups: Sequence[Sequence[Output]],
    name_of: Callable[[int, int], str],
    metadata: Mapping[str, str],
    most: int,
    *,
    rank: int = 0,
) -> list[PlannedFile]:
    """Outputs in files of at most ``most`` bytes of tensors; groups stay side by side.

    Args:
        groups: outputs that belong together, in order.
        name_of: (number from 0, how many files) to a file's name.
        metadata: ``__metadata__`` of each.
        most: as ``max_shard_bytes`` of ``loadkit.save``.
        rank: whose files these are.

    Raises:
        ModelError: safetensors cannot hold a name, a dtype or a shape, or so many tensors.
    """
    entries = [[(output.entry(), output) for output in group] for group in groups]
    by_entry = {id(entry): output for group in entries for entry, output in group}
    shards = split_shards([[entry for entry, _ in group] for group in entries], most)
    files = []
    for number, shard in enumerate(shards):
        layout = lay_out_file(shard, metadata)
        outputs = tuple(by_entry[id(entry)] for entry in layout.entries)
        files.append(PlannedFile(name_of(number, len(shards)), layout, outputs, rank))
    return files


def digest(values: Any) -> str:
    """A sha256 of JSON-able values, in hex."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
