"""Writing a model as GGUF: ``loadkit.save(model, path, save_format="gguf")``.

The way is loading run backwards: the model's layers say what of a parameter is which Hugging Face
tensor, the architecture's mapper what GGUF calls it, and its transforms are undone. Of a mixture
all experts' tensors of a projection become one.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from loadkit.config import HFConfig
from loadkit.errors import LoadkitError, ModelError, OptionError
from loadkit.file_checks import show
from loadkit.finish import check_ready
from loadkit.options import OptionSpec, validate_extra_config
from loadkit.origin import Origin, origin_of
from loadkit.retrace import checkpoint_origin
from loadkit.save import SaveReport, check_whole_model
from loadkit.save_config import check_unquantised, config_of, stated_tie
from loadkit.save_layout import Part, lay_out
from loadkit.sources import open_source
from loadkit.text import printable
from loadkit_gguf.architectures import GGUF_ARCHITECTURES, MIXTRAL, Architecture
from loadkit_gguf.config_keys import config_keys, rope_factors
from loadkit_gguf.encode import ENCODERS
from loadkit_gguf.export_files import split_parts, write_parts
from loadkit_gguf.ggml_types import GGML_TYPES, GGMLType
from loadkit_gguf.names import expert_of
from loadkit_gguf.stored import Piece, stored_tensor
from loadkit_gguf.tokenizer_keys import tokenizer_keys
from loadkit_gguf.writer import StoredTensor

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
    shards = split_parts(tensors, max_shard_bytes)
    files, copied = write_parts(path, shards, keys, origin, values, hf_config, refused)
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
