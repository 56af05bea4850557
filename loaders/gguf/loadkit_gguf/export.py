"""Writing a model as GGUF: ``loadkit.save(model, path, save_format="gguf")``.

The way is loading run backwards: the model's layers say what of a parameter is which Hugging Face
tensor, the architecture's mapper what GGUF calls it, and its transforms are undone. Of a mixture
all experts' tensors of a projection become one. Before a file gets its name, its header is read
back: a setting that GGUF cannot say is an error and never lost.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from loadkit.atomic_folder import AtomicFolder
from loadkit.config import HFConfig
from loadkit.errors import LoadkitError, ModelError, OptionError
from loadkit.file_checks import show
from loadkit.finish import check_ready
from loadkit.options import OptionSpec, validate_extra_config
from loadkit.origin import Origin, origin_of
from loadkit.output_file import OutputFile, write_error
from loadkit.retrace import checkpoint_origin
from loadkit.save import SaveReport, check_whole_model, file_blocks
from loadkit.save_config import check_unquantised, config_bytes, config_of, side_files, stated_tie
from loadkit.save_layout import Part, lay_out
from loadkit.saved_files import is_replaced
from loadkit.sources import open_source
from loadkit.sources.local_file import LocalFile
from loadkit.text import printable
from loadkit_gguf.architectures import GGUF_ARCHITECTURES, MIXTRAL, Architecture
from loadkit_gguf.config import read_config
from loadkit_gguf.config_keys import config_keys, rope_factors
from loadkit_gguf.encode import ENCODERS
from loadkit_gguf.ggml_types import GGML_TYPES, GGMLType
from loadkit_gguf.header import read_gguf_header
from loadkit_gguf.names import expert_of
from loadkit_gguf.stored import Piece, stored_tensor
from loadkit_gguf.tokenizer_keys import tokenizer_keys
from loadkit_gguf.writer import StoredTensor, write_file

if TYPE_CHECKING:
    from torch import nn

__all__ = ["SAVE_OPTIONS", "save_gguf"]

log = logging.getLogger("loadkit")

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
KINDS = (*FLOATS, *sorted(ENCODERS, reverse=True))
SAVE_OPTIONS = {
    "quantization": OptionSpec(
        "quantization",
        str,
        None,
        "the type of matrices; None: the dtype they have",
        choices=KINDS,
    ),
}
_TYPES = {kind.name: kind for kind in GGML_TYPES.values()}
_DTYPES = {dtype: name for name, dtype in FLOATS.items()}
# general.file_type, as llama.cpp counts them
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9}
_FILE_TYPES["BF16"] = 32
# What llama.cpp wants as float32 whatever the matrices are, without layer and suffix.
_ALWAYS_F32 = {"ffn_gate_inp", "position_embd", "token_types", "rope_freqs"}
_ENDS = {"token_embd", "output"}  # of 4 or 5 bits the embedding and the head are too few
_NOT_COMPARED = {"dtype", "architectures", "model_type", "rope_theta", "rope_scaling"}


@dataclass(frozen=True)
class _Target:
    """Where files go: ``folder``, and what the first one is called."""

    folder: Path
    name: str
    single: bool


def save_gguf(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    max_shard_bytes: int,
    config: Any = None,
    metadata: Mapping[str, str] | None = None,
    extra_config: Mapping[str, Any] | None = None,
) -> SaveReport:
    """Write a whole model.

    Args:
        model: as of ``loadkit.save``; at tp 1.
        path: a folder, which gets ``model.gguf`` with config.json and the tokenizer's files beside
            it; or the name of a file that ends in ``.gguf``, which holds everything.
        max_shard_bytes: most bytes of tensors in one file; more become parts named as
            ``llama-gguf-split`` names them.
        config, metadata: as of ``loadkit.save``; metadata become keys.
        extra_config: ``quantization``.

    Raises:
        LoadkitError: see ``loadkit.save``; ModelError GGUF_CONFIG, the config cannot be said in
            GGUF's keys, and GGUF_NAME, a tensor has no name there.
    """
    started = time.perf_counter()
    given = validate_extra_config(SAVE_OPTIONS, extra_config or {}, "gguf")
    origin = checkpoint_origin(model, origin_of(model))
    check_whole_model(origin)
    check_ready(model)
    values = config_of(model, config, origin)
    check_unquantised(values, origin)
    if values is None:
        raise ModelError(
            "the model has no config, and a GGUF file's keys are made of one",
            code="GGUF_CONFIG",
            hint="give config=",
        )
    name, known = _architecture(values)
    hf_config = _text_config(model, values)
    layout = lay_out(model, origin, None, tied=stated_tie(values) is not False)
    parts = [part for group in layout.groups for part in group]
    unsaved: Mapping[str, str] = getattr(known.mapper, "unsaved", {})
    refused = {part.name: unsaved[part.name] for part in parts if part.name in unsaved}
    parts = [part for part in parts if part.name not in unsaved]
    for left, reason in refused.items():
        log.warning("%s is not saved: %s", show(left), reason)
    tensors = _stored(parts, known, hf_config, given["quantization"])
    keys: dict[str, Any] = {
        "general.architecture": name,
        "general.file_type": _file_type(tensors),
        "general.quantization_version": 2,
        **config_keys(name, hf_config),
    }
    found, why = _tokenizer(origin)
    keys |= found
    if why:
        refused["tokenizer"] = why
    keys |= _metadata(metadata or {}, keys)
    target = _target(path)
    shards = _shards(tensors, max_shard_bytes)
    files, copied = _write(target, shards, keys, origin, values, hf_config, refused)
    return SaveReport(
        path=Path(path),
        files=files,
        tensors=len(tensors),
        total_size=sum(tensor.nbytes for tensor in tensors),
        ties=layout.ties,
        copied=copied,
        not_copied=refused,
        seconds=time.perf_counter() - started,
    )


# -- what is written -------------------------------------------------------------------------------


def _architecture(values: Mapping[str, Any]) -> tuple[str, Architecture]:
    """GGUF's name of an architecture, and what is known of it."""
    table = {known.hf_class: (name, known) for name, known in GGUF_ARCHITECTURES.items()}
    table |= {MIXTRAL.hf_class: ("llama", MIXTRAL)}
    table["MistralForCausalLM"] = table["LlamaForCausalLM"]
    for architecture in values.get("architectures") or ():
        if architecture in table:
            return table[architecture]
    raise ModelError(
        f"loadkit-gguf cannot write {printable(values.get('architectures'), 200)}; it writes "
        f"{', '.join(sorted(table))}",
        code="E_ARCHITECTURE",
        hint="save_format='safetensors' writes any model",
    )


def _text_config(model: nn.Module, values: Mapping[str, Any]) -> HFConfig:
    """The config that the text model is built from, its class's defaults filled in."""
    inner = values.get("text_config")
    defaults = getattr(type(model), "config_defaults", None) or {}
    return HFConfig.from_dict({**defaults, **(inner if isinstance(inner, dict) else values)})


def _stored(
    parts: Sequence[Part], known: Architecture, hf_config: HFConfig, asked: str | None
) -> list[StoredTensor]:
    """The file's tensors, in the model's order; experts are gathered."""
    gathered: dict[str, dict[int, Piece]] = {}
    nameless: list[str] = []
    undo = getattr(known.mapper, "undo", None)
    gguf_name = getattr(known.mapper, "gguf_name", None)
    if not callable(undo) or not callable(gguf_name):
        raise ModelError(f"the mapper of {known.hf_class} has no way back", code="GGUF_NAME")
    for part in parts:
        all_experts, number = expert_of(part.name) or (part.name, -1)
        name = gguf_name(all_experts)
        if name is None or name == all_experts:
            nameless.append(part.name)
            continue
        change = partial(undo, part.name, hf_config=hf_config)
        gathered.setdefault(name, {})[number] = Piece(part.tensor, part.make, change)
    if nameless:
        raise ModelError(
            f"{len(nameless)} tensor(s) have no name in GGUF: "
            + ", ".join(map(show, nameless[:5])),
            code="GGUF_NAME",
            tensor=nameless[0],
            detail={"tensors": nameless},
            hint="save_format='safetensors' keeps every name",
        )
    found = []
    for name, pieces in gathered.items():
        ordered = [pieces[number] for number in sorted(pieces)]
        found.append(stored_tensor(name, ordered, -1 not in pieces, _kind(name, ordered[0], asked)))
    factors = rope_factors(hf_config) if known.hf_class != "BertModel" else None
    if factors is not None:
        whole = Piece(torch.from_numpy(factors), None, lambda tensor: tensor)
        found.append(stored_tensor("rope_freqs.weight", [whole], False, _TYPES["F32"]))
    return found


def _kind(name: str, piece: Piece, asked: str | None) -> GGMLType:
    """The type that a tensor gets.

    Raises:
        ModelError: E_DTYPE, GGUF has none for its dtype.
    """
    own = _DTYPES.get(piece.tensor.dtype)
    if own is None:
        raise ModelError(
            f"{show(name)} is {piece.tensor.dtype}, which GGUF does not have",
            code="E_DTYPE",
            tensor=name,
            hint="load the model in float32, bfloat16 or float16",
        )
    components = name.split(".")
    bare = components[2] if components[0] == "blk" else components[0]
    if piece.tensor.dim() < 2 or bare in _ALWAYS_F32:
        return _TYPES["F32"]
    wanted = asked or own
    if wanted in FLOATS:
        return _TYPES[wanted]
    if bare in _ENDS and wanted != "Q8_0":
        wanted = "Q8_0"
    kind = _TYPES[wanted]
    if piece.tensor.shape[-1] % kind.block:
        log.info("%s has rows of %d: it stays F16", show(name), piece.tensor.shape[-1])
        return _TYPES["F16"]
    return kind


def _file_type(tensors: Sequence[StoredTensor]) -> int:
    """What most bytes of the layers' matrices are."""
    sizes: dict[str, int] = {}
    for tensor in tensors:
        if len(tensor.shape) > 1 and tensor.name.startswith("blk."):
            sizes[tensor.kind.name] = sizes.get(tensor.kind.name, 0) + tensor.nbytes
    return _FILE_TYPES[max(sizes, key=lambda name: sizes[name])] if sizes else 0


def _tokenizer(origin: Origin | None) -> tuple[dict[str, Any], str | None]:
    """The tokenizer's keys from where the model came from, and why there are none."""
    config = origin.config.model_config if origin is not None else None
    if origin is None or config is None or not config.source:
        return {}, "the model came from nowhere"
    try:
        with open_source(config.source, origin.config.load_config) as source:
            return tokenizer_keys(source, origin.config.load_config)
    except LoadkitError as error:
        return {}, error.message


def _metadata(given: Mapping[str, str], keys: Mapping[str, Any]) -> dict[str, str]:
    bad = [name for name in given if name in keys or name.startswith(("split.", "tokenizer."))]
    if bad or not all(isinstance(value, str) for value in given.values()):
        raise OptionError(
            "metadata has to be strings under names that a GGUF file does not use itself: "
            + ", ".join(map(show, bad))
        )
    return dict(given)


# -- files -----------------------------------------------------------------------------------------


def _target(path: str | os.PathLike[str]) -> _Target:
    where = Path(path).expanduser()
    if where.suffix == ".gguf" and not where.is_dir():
        return _Target(where.parent, where.name, True)
    return _Target(where, "model.gguf", False)


def _shards(tensors: Sequence[StoredTensor], most: int) -> list[list[StoredTensor]]:
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
    import numpy as np

    split = {
        "split.no": np.uint16(number),
        "split.count": np.uint16(len(shards)),
        "split.tensors.count": np.int32(sum(map(len, shards))),
    }
    return {**(keys if number == 0 else {}), **split}


def _write(
    target: _Target,
    shards: Sequence[Sequence[StoredTensor]],
    keys: Mapping[str, Any],
    origin: Origin | None,
    values: dict[str, Any],
    hf_config: HFConfig,
    refused: dict[str, str],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """All files in place, or none; returns the weight files and those that were copied."""
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
