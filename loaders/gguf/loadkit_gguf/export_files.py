"""The files of a model written as GGUF: one, or parts, in a folder or by name; all or none.

Before a file gets its name its header is read as a load will read it: a setting that GGUF cannot
say is an error and never lost.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loadkit.atomic_folder import AtomicFolder
from loadkit.config import HFConfig
from loadkit.errors import ModelError
from loadkit.origin import Origin
from loadkit.output_file import OutputFile, write_error
from loadkit.save import file_blocks
from loadkit.save_config import config_bytes, side_files
from loadkit.saved_files import is_replaced
from loadkit.sources.local_file import LocalFile
from loadkit.text import printable
from loadkit_gguf.config import read_config
from loadkit_gguf.header import read_gguf_header
from loadkit_gguf.writer import StoredTensor, write_file

__all__ = ["split_parts", "write_parts"]

_NOT_COMPARED = {"dtype", "architectures", "model_type", "rope_theta", "rope_scaling"}


@dataclass(frozen=True)
class _Target:
    """Where files go: ``folder``, and what the first one is called."""

    folder: Path
    name: str
    single: bool


def _target(path: str | os.PathLike[str]) -> _Target:
    where = Path(path).expanduser()
    if where.suffix == ".gguf" and not where.is_dir():
        return _Target(where.parent, where.name, True)
    return _Target(where, "model.gguf", False)


def split_parts(tensors: Sequence[StoredTensor], most: int) -> list[list[StoredTensor]]:
    """Tensors in files of at most ``most`` bytes, in order."""
    shards: list[list[StoredTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.nbytes > most:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.nbytes
    return shards


def _named(target: _Target, shards: Sequence[Any]) -> list[str]:
    if len(shards) == 1:
        return [target.name]
    stem = target.name.removesuffix(".gguf")
    return [f"{stem}-{n + 1:05d}-of-{len(shards):05d}.gguf" for n in range(len(shards))]


def _keys_of(keys: Mapping[str, Any], number: int, shards: Sequence[Any]) -> dict[str, Any]:
    """The keys of one part: the model's are in the first."""
    if len(shards) == 1:
        return dict(keys)
    split = {
        "split.no": np.uint16(number),
        "split.count": np.uint16(len(shards)),
        "split.tensors.count": np.int32(sum(map(len, shards))),
    }
    return {**(keys if number == 0 else {}), **split}


def write_parts(
    path: str | os.PathLike[str],
    shards: Sequence[Sequence[StoredTensor]],
    keys: Mapping[str, Any],
    origin: Origin | None,
    values: dict[str, Any],
    hf_config: HFConfig,
    refused: dict[str, str],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """All files in place, or none; returns the weight files and those that were copied.

    Args:
        path: a folder, or the name of a file that ends in ``.gguf``.
        shards: the tensors of each part.
        keys: the first part's keys.
        origin: where the model came from, for the files beside its weights.
        values: of config.json, which a folder gets.
        hf_config: what the headers are compared with once they are written.
        refused: gets files that could not be had, with the reason.

    Raises:
        LoadkitError: the folder, or the file, is as it was.
    """
    target = _target(path)
    names = _named(target, shards)
    if target.single:
        _write_single(target, names, shards, keys, hf_config)
        return tuple(names), ()
    with (
        side_files(origin) as (files, not_copied),
        AtomicFolder(target.folder, _is_replaced) as folder,
    ):
        refused |= not_copied
        for name, file in files:
            with folder.create(name) as out:
                for block in file_blocks(file):
                    out.write(block)
        with folder.create("config.json") as out:
            out.write(config_bytes(values, dtype=None, tied=False))
        written = []
        for number, (name, shard) in enumerate(zip(names, shards, strict=True)):
            with folder.create(name) as out:
                write_file(out, _keys_of(keys, number, shards), shard)
            written.append(folder.path_of(name))
        _check_back(written, hf_config)
        return tuple(names), tuple(name for name, _ in files)


def _write_single(
    target: _Target,
    names: Sequence[str],
    shards: Sequence[Sequence[StoredTensor]],
    keys: Mapping[str, Any],
    hf_config: HFConfig,
) -> None:
    """Files under hidden names beside the target, renamed when all are durable and read back."""
    target.folder.mkdir(parents=True, exist_ok=True)
    hidden = [target.folder / f".loadkit-save-{os.getpid()}-{name}" for name in names]
    try:
        for number, (path, shard) in enumerate(zip(hidden, shards, strict=True)):
            with OutputFile(path, names[number]) as out:
                write_file(out, _keys_of(keys, number, shards), shard)
        _check_back(hidden, hf_config)
        for path, name in zip(hidden, names, strict=True):
            try:
                path.replace(target.folder / name)
            except OSError as error:
                raise write_error(error, name, "put in place") from error
    finally:
        for path in hidden:
            with suppress(OSError):
                path.unlink(missing_ok=True)


def _is_replaced(name: str) -> bool:
    """Whether a file of an old folder belongs to what is replaced."""
    return is_replaced(name) or (name.startswith("model") and name.endswith(".gguf"))


def _check_back(paths: Sequence[Path], hf_config: HFConfig) -> None:
    """Read the headers as a load will, and compare the config with the model's.

    Raises:
        ModelError: GGUF_CONFIG, a setting would be another one.
    """
    opened = [LocalFile(path.name, str(path)) for path in paths]
    try:
        found = read_config([read_gguf_header(file) for file in opened])
    finally:
        for file in opened:
            file.close()
    for name, value in found.items():
        mine = hf_config.get(name)
        if name in _NOT_COMPARED or name.endswith("_token_id") or mine is None:
            continue
        if isinstance(mine, list):
            mine, value = list(mine), list(value)
        if mine != value and not _close(mine, value):
            raise ModelError(
                f"config.json says {name} = {printable(repr(mine), 120)}; a GGUF file would say "
                f"{printable(repr(value), 120)}",
                code="GGUF_CONFIG",
                detail={"key": name},
                hint="save_format='safetensors' keeps every setting",
            )


def _close(one: Any, other: Any) -> bool:
    """Whether two numbers are the same float32."""
    if not all(isinstance(n, int | float) and not isinstance(n, bool) for n in (one, other)):
        return False
    return bool(abs(one - other) <= 1e-6 * abs(one))
