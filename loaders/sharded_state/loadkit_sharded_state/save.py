"""Saving a model as its ranks hold it, in safetensors files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loadkit.manifest import FileEntry, TensorEntry
from loadkit.options import validate_extra_config
from loadkit.rank_files.save import save_rank
from loadkit.safetensors_writer import (
    Entry,
    check_metadata,
    entry_of,
    lay_out_file,
    write_safetensors,
)
from loadkit.saved_files import MAX_SHARD_BYTES, split_shards
from loadkit_sharded_state.hashing import HashingSink
from loadkit_sharded_state.pattern import FilePattern

if TYPE_CHECKING:
    import torch
    from torch import nn

    from loadkit.options import OptionSpec
    from loadkit.rank_files.contents import Contents
    from loadkit.rank_files.folder import RankFolder
    from loadkit.save import SaveReport

__all__ = ["save_model"]


def save_model(
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
    given = validate_extra_config(options, extra_config or {}, "sharded_state")
    writer = _Writer(
        FilePattern(str(given["pattern"])), max_shard_bytes, check_metadata(metadata or {})
    )
    return save_rank(model, path, writer, save_id=str(given["save_id"]), config=config)


@dataclass(frozen=True)
class _Writer:
    """How a rank's files are called, and what is in them."""

    pattern: FilePattern
    most: int
    header: Mapping[str, str]

    def rank_of(self, name: str) -> int | None:
        """Whose weight file a name is."""
        numbers = self.pattern.match(name)
        return None if numbers is None else numbers.rank

    def write(self, folder: RankFolder, rank: int, contents: Contents) -> dict[str, FileEntry]:
        """All files of one rank."""
        files: dict[str, FileEntry] = {}
        with ThreadPoolExecutor(2, "loadkit-hash") as pool:
            for part, cuts in enumerate(_files(contents.tensors, self.most)):
                name = self.pattern.name(rank, part)
                with folder.create(name) as out:
                    files[name] = _write(HashingSink(out, pool), rank, cuts, self.header)
        return files


@dataclass(frozen=True)
class _Cut:
    """An entry of a file, and which rows of its parameter it is."""

    entry: Entry
    row: int = 0
    rows: int | None = None


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
