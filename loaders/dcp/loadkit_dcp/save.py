"""Saving a model as a folder of ``torch.distributed.checkpoint``, in a checkpoint's names."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadkit.atomic_folder import AtomicFolder
from loadkit.errors import OptionError
from loadkit.finish import check_ready
from loadkit.options import validate_extra_config
from loadkit.origin import origin_of
from loadkit.retrace import checkpoint_origin
from loadkit.safetensors_writer import entry_of
from loadkit.save import SaveReport, check_whole_model, file_blocks
from loadkit.save_config import check_unquantised, config_bytes, config_of, side_files, stated_tie
from loadkit.save_layout import Part, lay_out
from loadkit.saved_files import MAX_SHARD_BYTES, is_replaced, main_dtype, split_shards
from loadkit_dcp.checkpoint import METADATA
from loadkit_dcp.writing import Written, metadata_bytes, write_item

if TYPE_CHECKING:
    from torch import nn

    from loadkit.options import OptionSpec

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
    """Write a whole model; ``torch.distributed.checkpoint.load`` reads it at any number of ranks.

    One tensor at a time is in memory beside the model, and of those that lie there in one piece
    none.

    Args:
        model: loaded or built by loadkit, or any module.
        path: the folder; it changes as a whole.
        options: what ``extra_config`` may hold.
        max_shard_bytes: most bytes of tensors in one file, where no single tensor is larger.
        config: as of ``loadkit.save``.
        metadata: not of this format.
        extra_config: ``weights_key``.

    Raises:
        LoadkitError: see ``loadkit.save``; the folder is as it was.
    """
    started = time.perf_counter()
    given = validate_extra_config(options, extra_config or {}, "dcp")
    key = _keys(given["weights_key"])
    if metadata:
        raise OptionError(
            "save_format 'dcp' has no metadata of the caller's",
            detail={"options": ["metadata"]},
            hint="leave metadata out",
        )
    origin = checkpoint_origin(model, origin_of(model))
    check_whole_model(origin)
    check_ready(model)
    values = config_of(model, config, origin)
    check_unquantised(values, origin)
    layout = lay_out(model, origin, None, tied=stated_tie(values) is not False)
    files = _files(layout.groups, max_shard_bytes)
    parts = [part for parts in files for part in parts]
    dtype = main_dtype(entry_of(part.name, part.tensor) for part in parts)
    names: list[str] = []
    written: list[Written] = []
    with (
        side_files(origin) as (beside, refused),
        AtomicFolder(path, is_replaced) as folder,
    ):
        for other, file in beside:
            with folder.create(other) as out:
                for block in file_blocks(file):
                    out.write(block)
        if values is not None:
            with folder.create("config.json") as out:
                out.write(config_bytes(values, dtype=dtype, tied=bool(layout.ties)))
        for number, inside in enumerate(files):
            names.append(f"__0_{number}.distcp")
            with folder.create(names[-1]) as out:
                at = 0
                for part in inside:
                    tensor = part.tensor if part.make is None else part.make()
                    written.append(write_item(out, names[-1], at, (*key, part.name), tensor))
                    at = written[-1].end
        with folder.create(METADATA) as out:
            out.write(metadata_bytes(written))
    return SaveReport(
        path=Path(path),
        files=(*names, METADATA),
        tensors=len(parts),
        total_size=sum(part.tensor.nbytes for part in parts),
        ties=layout.ties,
        copied=tuple(other for other, _ in beside),
        not_copied=refused,
        seconds=time.perf_counter() - started,
    )


def _keys(weights_key: str | None) -> tuple[str, ...]:
    """The keys of the dict that the tensors are put into.

    Raises:
        OptionError: one of them is empty.
    """
    if weights_key is None:
        return ()
    keys = tuple(weights_key.split("/"))
    if not all(keys) or not weights_key.isprintable():
        raise OptionError(
            f"weights_key is {weights_key!r}; accepted: a key, or keys with '/' between them",
            detail={"option": "weights_key"},
        )
    return keys


def _files(groups: Sequence[Sequence[Part]], most: int) -> list[list[Part]]:
    """The tensors in files, those of one parameter side by side."""
    entries = [[(entry_of(part.name, part.tensor), part) for part in group] for group in groups]
    by_entry = {id(entry): part for group in entries for entry, part in group}
    shards = split_shards([[entry for entry, _ in group] for group in entries], most)
    return [[by_entry[id(entry)] for entry in shard] for shard in shards]
