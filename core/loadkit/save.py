"""Saving a model as a Hugging Face checkpoint: ``loadkit.save``.

The way is loading run backwards. The class's mapper gives names, each layer says which rows of a
fused parameter are which shard, and the plan that the model was loaded by, which it remembers,
checks that every tensor is written from where it was read to.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from loadkit.atomic_folder import AtomicFolder
from loadkit.errors import OptionError, UnknownNameError, UsageError
from loadkit.finish import check_ready
from loadkit.local_memory import is_spread
from loadkit.origin import Origin, origin_of
from loadkit.retrace import checkpoint_origin
from loadkit.safetensors_writer import (
    BLOCK,
    Entry,
    blocks_of,
    check_metadata,
    entry_of,
    write_safetensors,
)
from loadkit.save_config import (
    check_unquantised,
    config_bytes,
    config_of,
    side_files,
    stated_tie,
)
from loadkit.save_layout import Layout, Part, lay_out
from loadkit.saved_files import (
    INDEX,
    MAX_SHARD_BYTES,
    index_bytes,
    is_replaced,
    main_dtype,
    shard_name,
    split_shards,
)
from loadkit.text import printable

if TYPE_CHECKING:
    from loadkit.mapper import WeightsMapper
    from loadkit.sources.base import File

__all__ = ["MAX_SHARD_BYTES", "SaveReport", "check_whole_model", "save", "split_shards"]

log = logging.getLogger("loadkit")


@dataclass(frozen=True)
class SaveReport:
    """What was written.

    Attributes:
        path: the folder.
        files: its weight files in order, then the index if there is one.
        tensors: how many tensors they hold.
        total_size: bytes of these tensors.
        ties: parameter -> the parameters that share its tensor and were not written again.
        copied: files that came from the source.
        not_copied: files of the source that could not be had, with the reason.
        seconds: wall time.
        missing_ranks: of a model that several ranks hold, those that have not saved yet; until
            they have, the folder is as it was.
    """

    path: Path
    files: tuple[str, ...]
    tensors: int
    total_size: int
    ties: dict[str, list[str]] = field(default_factory=dict)
    copied: tuple[str, ...] = ()
    not_copied: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    missing_ranks: tuple[int, ...] = ()


def save(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    save_format: str = "safetensors",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    config: Any = None,
    mapper: WeightsMapper | None = None,
    metadata: Mapping[str, str] | None = None,
    model_loader_extra_config: Mapping[str, Any] | None = None,
) -> SaveReport:
    """Write a model under its Hugging Face names, with its config.json and tokenizer files.

    Fused parameters are split into the checkpoint's tensors, padding is cut, a tensor that several
    parameters share is written once, buffers are written if the checkpoint had them. A module
    without a mapper is saved under its own names. Tensors are streamed from the parameters'
    memory; dtypes stay.

    The folder changes as a whole (``AtomicFolder``): after an error it is as it was, and files in
    it that are no part of a checkpoint stay. It may be the folder that the model was loaded from,
    and that its parameters are views of: no byte of an existing file is overwritten.

    With ``save_format="sharded_state"`` each rank writes what it holds, as it holds it: fused,
    sharded, post-processed or not. The folder changes when the last rank is done.

    Args:
        model: loaded or built by loadkit, or any module, on any device; at tp 1, unless the format
            keeps ranks' parts.
        path: the folder; made with its parents where it is missing.
        save_format: "safetensors", or a load format whose loader has ``save_model``.
        max_shard_bytes: most bytes of tensors in one file, where no single tensor is larger.
        config: for config.json: a ``ModelConfig``, ``HFConfig``, mapping or Hugging Face config;
            None: the one the model was loaded with, its overrides applied.
        mapper: checkpoint names to the model's; None: the class's, or what ``load_into`` got.
        metadata: strings for ``__metadata__`` of each file, besides ``format: pt``.
        model_loader_extra_config: options of the save_format's loader.

    Raises:
        UsageError: PARTIAL_MODEL, this process holds a rank's part; QUANTIZED, weights that are
            quantised in memory only; or ``path`` is a file.
        ModelError: NOT_INVERTIBLE, NAME_NOT_REVERSIBLE, NAME_COLLISION, REPACKED, E_NAME, E_DTYPE:
            what would be written is no checkpoint of this model. Nothing was written.
        CoverageError: a parameter has no memory.
        WriteError: E_IO with ``errno``: the disk is full, say. The old folder is as it was.
        ReadFailure: a tokenizer file of the source could not be read.
        UnknownNameError: no such ``save_format``.
    """
    started = time.perf_counter()
    _check_options(max_shard_bytes)
    _check_gathered(model)
    if save_format != "safetensors":
        if mapper is not None:
            raise OptionError(f"save_format {save_format!r} keeps the model's names: no mapper")
        return _save_by_loader(
            save_format,
            model,
            path,
            max_shard_bytes=max_shard_bytes,
            config=config,
            metadata=metadata,
            extra_config=model_loader_extra_config,
        )
    if model_loader_extra_config:
        raise OptionError("save_format 'safetensors' has no model_loader_extra_config")
    origin = checkpoint_origin(model, origin_of(model))
    check_whole_model(origin)
    check_ready(model)
    header = check_metadata(metadata or {})
    values = config_of(model, config, origin)
    check_unquantised(values, origin)
    layout = lay_out(model, origin, mapper, tied=stated_tie(values) is not False)
    shards = split_shards(_entries(layout), max_shard_bytes)
    other = {}
    if values is not None:
        dtype = main_dtype(entry for shard in shards for entry in shard)
        other["config.json"] = config_bytes(values, dtype=dtype, tied=bool(layout.ties))
    with side_files(origin) as (files, refused):
        for name, why in refused.items():
            log.warning("%s is not copied: %s", printable(name, ascii_only=False), why)
        written = _write(path, shards, header, other, files)
    return SaveReport(
        path=Path(path),
        files=written,
        tensors=sum(map(len, shards)),
        total_size=sum(entry.nbytes for shard in shards for entry in shard),
        ties=layout.ties,
        copied=tuple(name for name, _ in files),
        not_copied=refused,
        seconds=time.perf_counter() - started,
    )


def _check_options(max_shard_bytes: int) -> None:
    most: object = max_shard_bytes
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise OptionError(f"max_shard_bytes is {most!r}; accepted: a number of bytes, at least 1")


def _save_by_loader(save_format: str, *arguments: Any, **options: Any) -> SaveReport:
    """Let a load format's own loader save.

    Raises:
        UnknownNameError, NotInstalledError: there is no such format here.
        UsageError: it can only be loaded.
    """
    from loadkit import tables

    try:
        loader: Any = tables.loaders.lookup(save_format)
    except UnknownNameError as error:
        raise UnknownNameError(
            f"no save_format {printable(save_format)!r}",
            hint="save_format='safetensors' writes a Hugging Face checkpoint",
        ) from error
    own = getattr(loader, "save_model", None)
    if not callable(own):
        raise UsageError(
            f"load format {save_format!r} can be loaded and not saved",
            hint="save_format='safetensors' writes a Hugging Face checkpoint",
        )
    report: SaveReport = own(*arguments, **options)
    return report


def _check_gathered(model: nn.Module) -> None:
    """Refuse parameters of which this process holds a part of a device mesh's.

    Raises:
        UsageError: PARTIAL_MODEL.
    """
    spread = [name for name, param in model.named_parameters() if is_spread(param)]
    if spread:
        raise UsageError(
            f"{len(spread)} parameter(s) are DTensors, of which this process holds a part: "
            f"{printable(spread[0])}",
            code="PARTIAL_MODEL",
            parameter=spread[0],
            hint="save a module that has their full_tensor() in their place, or use "
            "torch.distributed.checkpoint",
        )


def check_whole_model(origin: Origin | None) -> None:
    """Refuse one rank of several.

    Raises:
        UsageError: PARTIAL_MODEL.
    """
    parallel = origin.config.parallel_config if origin is not None else None
    if parallel is None:
        return
    sizes = {"tp": parallel.tp_size, "pp": parallel.pp_size, "ep": parallel.ep_size}
    several = {name: size for name, size in sizes.items() if size > 1}
    if several:
        shown = ", ".join(f"{name} {size}" for name, size in several.items())
        raise UsageError(
            f"this model is one rank's part ({shown}); a checkpoint of Hugging Face's layout holds "
            "whole tensors",
            code="PARTIAL_MODEL",
            detail={**several, "tp_rank": parallel.tp_rank, "pp_rank": parallel.pp_rank},
            hint="load the source with ParallelConfig(), which is tp 1, and save that model",
        )


def _entries(layout: Layout) -> list[list[Entry]]:
    return [[_entry(part) for part in group] for group in layout.groups]


def _entry(part: Part) -> Entry:
    """A part as it is, or made when its turn comes."""
    entry = entry_of(part.name, part.tensor)
    make = part.make
    return entry if make is None else replace(entry, blocks=lambda: blocks_of(make()))


def _write(
    path: str | os.PathLike[str],
    shards: Sequence[Sequence[Entry]],
    metadata: Mapping[str, str],
    other: Mapping[str, bytes],
    files: Sequence[tuple[str, File]],
) -> tuple[str, ...]:
    """Everything into the folder; what makes it a checkpoint comes last."""
    with AtomicFolder(path, is_replaced) as folder:
        for name, file in files:
            with folder.create(name) as out:
                for block in file_blocks(file):
                    out.write(block)
        for name, data in other.items():
            with folder.create(name) as out:
                out.write(data)
        names: list[str] = []
        weight_map: dict[str, str] = {}
        total = 0
        for number, shard in enumerate(shards):
            names.append(shard_name(number, len(shards)))
            with folder.create(names[-1]) as out:
                total += write_safetensors(out, shard, metadata)
            weight_map.update((entry.name, names[-1]) for entry in shard)
        if len(shards) > 1:
            names.append(INDEX)
            with folder.create(INDEX) as out:
                out.write(index_bytes(weight_map, total))
    return tuple(names)


def file_blocks(file: File) -> Iterator[bytes]:
    """A source's file, a block at a time."""
    for start in range(0, file.size, BLOCK):
        yield file.read(start, min(BLOCK, file.size - start))
