"""Saving a model as tensorizer files: whole, in a checkpoint's names, or as its ranks hold it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadkit.atomic_folder import AtomicFolder
from loadkit.entry_index import core_version
from loadkit.errors import OptionError
from loadkit.file_checks import show_path
from loadkit.finish import check_ready
from loadkit.manifest import MANIFEST, FileEntry, Manifest, manifest_bytes
from loadkit.options import validate_extra_config
from loadkit.origin import origin_of
from loadkit.rank_files.save import save_rank
from loadkit.retrace import checkpoint_origin
from loadkit.safetensors_writer import entry_of
from loadkit.save import SaveReport, check_whole_model, file_blocks
from loadkit.save_config import check_unquantised, config_bytes, config_of, side_files, stated_tie
from loadkit.save_layout import Layout, lay_out
from loadkit.saved_files import MAX_SHARD_BYTES, is_replaced, main_dtype
from loadkit_tensorizer.found import SUFFIX
from loadkit_tensorizer.library import library
from loadkit_tensorizer.uri import FileName, parse_uri
from loadkit_tensorizer.writing import entry_of_file, refuse_idle, saving_key, write_file

if TYPE_CHECKING:
    import torch
    from torch import nn

    from loadkit.options import OptionSpec
    from loadkit.origin import Origin
    from loadkit.rank_files.contents import Contents
    from loadkit.rank_files.folder import RankFolder

__all__ = ["save_model"]

_WHOLE, _RANKS = "model.tensors", "model-rank-%03d.tensors"


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
    """Write a model, or one rank's part of it.

    Args:
        model: loaded or built by loadkit, or any module.
        path: the folder; it changes as a whole.
        options: what ``extra_config`` may hold.
        max_shard_bytes, metadata: not of this format.
        config: as of ``loadkit.save``.
        extra_config: ``tensorizer_uri``, ``encryption_keyfile``, ``save_id``.

    Raises:
        LoadkitError: see ``loadkit.save``; the folder is as it was.
    """
    given = validate_extra_config(options, extra_config or {}, "tensorizer")
    idle: dict[str, Any] = {"metadata": metadata} if metadata else {}
    if max_shard_bytes != MAX_SHARD_BYTES:
        idle["max_shard_bytes"] = max_shard_bytes
    name = _file_name(given["tensorizer_uri"], origin_of(model))
    if given["save_id"] and not name.per_rank:
        idle["save_id"] = given["save_id"]
    refuse_idle(idle)
    library()
    key = saving_key(given["encryption_keyfile"])
    if name.per_rank:
        writer = _RankWriter(name, key)
        return save_rank(model, path, writer, save_id=str(given["save_id"]), config=config)
    return _save_whole(model, path, name.name, key, config)


def _file_name(given: str | None, origin: Origin | None) -> FileName:
    """The file's name; by default that of a rank's where the model is one of several."""
    if given is None:
        world = 1 if origin is None else origin.config.parallel_config.world_size
        given = _RANKS if world > 1 else _WHOLE
    name = parse_uri(given)
    if name.scheme or name.folder or not name.name.endswith(SUFFIX):
        raise OptionError(
            f"tensorizer_uri {show_path(given.partition('?')[0])} is no name of a {SUFFIX} file",
            detail={"option": "tensorizer_uri"},
            hint=f"the folder is loadkit.save's path; the name is such as {_WHOLE} or {_RANKS}",
        )
    return name


@dataclass(frozen=True)
class _RankWriter:
    """What the ranks' files are called, and how they are written."""

    name: FileName
    key: bytes | None

    def rank_of(self, name: str) -> int | None:
        """Whose file a name is."""
        return self.name.rank_of(name)

    def write(self, folder: RankFolder, rank: int, contents: Contents) -> dict[str, FileEntry]:
        """One file for one rank."""
        name = self.name.of(rank)
        with folder.create(name):
            write_file(folder.staged(name), name, contents.tensors.items(), self.key)
        return {name: entry_of_file(folder.staged(name), name, rank)}


def _save_whole(
    model: nn.Module, path: str | os.PathLike[str], name: str, key: bytes | None, config: Any
) -> SaveReport:
    started = time.perf_counter()
    origin = checkpoint_origin(model, origin_of(model))
    check_whole_model(origin)
    check_ready(model)
    values = config_of(model, config, origin)
    check_unquantised(values, origin)
    layout = lay_out(model, origin, None, tied=stated_tie(values) is not False)
    parts = [part for group in layout.groups for part in group]
    dtype = main_dtype(entry_of(part.name, part.tensor) for part in parts)
    with (
        side_files(origin) as (files, refused),
        AtomicFolder(path, lambda one: is_replaced(one) or one == name) as folder,
    ):
        for other, file in files:
            with folder.create(other) as out:
                for block in file_blocks(file):
                    out.write(block)
        if values is not None:
            with folder.create("config.json") as out:
                out.write(config_bytes(values, dtype=dtype, tied=bool(layout.ties)))
        with folder.create(name):
            write_file(folder.staged(name), name, _tensors(layout), key)
        entry = entry_of_file(folder.staged(name), name, 0)
        with folder.create(MANIFEST) as out:
            out.write(manifest_bytes(_manifest(name, entry, origin)))
    return SaveReport(
        path=Path(path),
        files=(name,),
        tensors=len(parts),
        total_size=sum(part.tensor.nbytes for part in parts),
        ties=layout.ties,
        copied=tuple(other for other, _ in files),
        not_copied=refused,
        seconds=time.perf_counter() - started,
    )


def _tensors(layout: Layout) -> Iterator[tuple[str, torch.Tensor]]:
    """What is written; a tensor that has to be computed is, when its turn comes."""
    for group in layout.groups:
        for part in group:
            yield part.name, part.tensor if part.make is None else part.make()


def _manifest(name: str, entry: FileEntry, origin: Origin | None) -> Manifest:
    config = None if origin is None else origin.config
    return Manifest(
        layout="checkpoint",
        files={name: entry},
        dtype="" if config is None else config.model_config.dtype_name,
        architecture="" if origin is None else origin.architecture,
        source="" if config is None else config.model_config.source,
        loadkit_version=core_version() or "",
    )
