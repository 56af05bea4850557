"""A config as Hugging Face writes it, from the keys and tensors of GGUF files alone.

What the file does not state and the model family has a default for is left out, so that it is the
family's word that counts. Tied embeddings are decided from the tensors: no ``output.weight``.

Source: the keys of the GGUF specification, and what ``convert_hf_to_gguf.py`` writes into them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from loadkit.errors import ArchitectureError, ConfigFileError
from loadkit.file_checks import show
from loadkit.text import nearest
from loadkit_gguf.architectures import GGUF_ARCHITECTURES, find_architecture
from loadkit_gguf.keys import Keys

if TYPE_CHECKING:
    from loadkit_gguf.header import GGUFHeader
    from loadkit_gguf.tensor_entries import GGUFTensor

__all__ = ["LLAMA3", "architecture_of", "read_config", "stretch"]

_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_MAX_FACTORS = 1 << 12
# What Llama 3.1 and its successors were trained with; files hold only the factors that follow.
LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def architecture_of(header: GGUFHeader) -> str:
    """``general.architecture``.

    Raises:
        ConfigFileError: it is missing, or no name.
    """
    found = header.metadata.get("general.architecture")
    if isinstance(found, str) and found:
        return found
    what = "lacks" if found is None else "has no name in"
    raise ConfigFileError(
        f"{show(header.file.name)} {what} 'general.architecture', which says what model it is",
        file=header.file.name,
        detail={"missing": ["general.architecture"]},
    )


def read_config(
    parts: Sequence[GGUFHeader], *, named: str | None = None, own_rope: bool = False
) -> dict[str, Any]:
    """The config of a model.

    Args:
        parts: the file's header, or those of all files of a split one, in order.
        named: the class the caller asked for, which an unknown architecture needs.
        own_rope: the caller states the rope settings, so the file's are not looked at.

    Raises:
        ConfigFileError: E_CONFIG, required keys are missing (all are named), or a value cannot be.
        ArchitectureError: nothing is known of ``general.architecture``, and ``named`` is None.
    """
    first = parts[0]
    architecture = architecture_of(first)
    known = find_architecture(architecture, first.metadata)
    if known is None and named is None:
        raise _unknown(first, architecture)
    tensors = {tensor.name: tensor for part in parts for tensor in part.tensors}
    keys = Keys(architecture, first.metadata, tensors, first.file.name)
    config = _common(keys)
    if known is not None:
        config |= {"architectures": [known.hf_class], "model_type": known.model_type}
        config |= known.more(keys)
    elif named is not None:
        config |= {"architectures": [named], "model_type": architecture}
    keys.check()
    if not own_rope:
        _rope(keys, config)
    return {key: value for key, value in config.items() if value is not None}


def _common(keys: Keys) -> dict[str, Any]:
    """What every decoder has."""
    heads = keys.count("attention.head_count")
    config: dict[str, Any] = {
        "num_hidden_layers": keys.count("block_count"),
        "hidden_size": keys.count("embedding_length"),
        "intermediate_size": keys.count("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", heads),
        "head_dim": _head_size(keys),
        "vocab_size": _vocab_size(keys),
        "max_position_embeddings": keys.count("context_length", None),
        "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.real("rope.freq_base", 10_000.0),
        "tie_word_embeddings": "output.weight" not in keys.tensors,
        "dtype": _dtype(keys.tensors),
    }
    turned, size = keys.count("rope.dimension_count", None), config["head_dim"]
    size = size or (config["hidden_size"] // heads if heads else 0)
    if turned and size and turned != size:
        config["partial_rotary_factor"] = turned / size
    for name in ("bos", "eos", "padding"):
        value = keys.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(value, int):
            config[f"{'pad' if name == 'padding' else name}_token_id"] = value
    return config


def _head_size(keys: Keys) -> int | None:
    size = keys.count("attention.key_length", None)
    other = keys.count("attention.value_length", size)
    if size != other:
        keys.bad("attention.value_length", f"is {other}", f"the key's length, {size}")
    return None if size is None else int(size)


def _vocab_size(keys: Keys) -> int | None:
    """The stated size, else the embedding's rows."""
    stated = keys.count("vocab_size", None)
    if stated is not None:
        return int(stated)
    embedding = keys.tensors.get("token_embd.weight")
    if embedding is None or not embedding.shape:
        keys.missing.append("token_embd.weight")
        return None
    return embedding.shape[0]


def _dtype(tensors: Mapping[str, GGUFTensor]) -> str:
    """bfloat16, unless every matrix is plain: then what most of their bytes are in."""
    sizes: dict[str, int] = {}
    for tensor in tensors.values():
        if tensor.kind.dtype is None:
            return "bfloat16"
        if len(tensor.shape) > 1 and tensor.dtype in _FLOATS:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    return _FLOATS[max(sizes, key=lambda name: sizes[name])] if sizes else "bfloat16"


# -- rope ------------------------------------------------------------------------------------------


def _rope(keys: Keys, config: dict[str, Any]) -> None:
    """``rope_scaling``, where the file scales."""
    kind = keys.text("rope.scaling.type") or ""
    factor = keys.real("rope.scaling.factor", 0.0) or keys.real("rope.scale_linear", 0.0)
    original = keys.count("rope.scaling.original_context_length", None)
    if kind == "yarn":
        config["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": keys.real("rope.scaling.yarn_beta_fast"),
            "beta_slow": keys.real("rope.scaling.yarn_beta_slow"),
        }
        config["rope_scaling"] = {k: v for k, v in config["rope_scaling"].items() if v is not None}
    elif kind in ("", "linear"):
        if factor not in (0.0, 1.0):
            config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif kind != "none":
        keys.bad("rope.scaling.type", f"is {show(kind)}", "none, linear or yarn")
    factors = keys.tensors.get("rope_freqs.weight")
    if factors is not None:
        scaling = _llama3(keys, config, factors)
        if scaling is not None:
            config["rope_scaling"] = scaling


def _llama3(keys: Keys, config: dict[str, Any], tensor: GGUFTensor) -> dict[str, Any] | None:
    """The settings that give the file's frequency factors; None where they are all 1 (or all 0).

    Raises:
        ConfigFileError: no known settings give them.
    """
    size = config.get("head_dim") or config["hidden_size"] // max(config["num_attention_heads"], 1)
    turned = int(size * config.get("partial_rotary_factor", 1.0))
    found = _numbers(keys, tensor, turned // 2)
    if len(set(found)) == 1 and found[0] in (0.0, 1.0):
        return None
    settings = {"rope_type": "llama3", "factor": float(max(found)), **LLAMA3}
    theta = config["rope_theta"]
    for index, value in enumerate(found):
        wave = 2 * math.pi * theta ** (2 * index / turned)
        if not math.isclose(stretch(wave, settings), value, rel_tol=1e-4):
            raise ConfigFileError(
                f"{show(keys.file)}: {show(tensor.name)} holds rope factors that are not Llama 3's "
                f"(number {index} is {value:g})",
                file=keys.file,
                tensor=tensor.name,
                offset=tensor.offset,
                hint="state them: hf_overrides={'rope_scaling': {...}}",
            )
    return settings


def stretch(wave: float, settings: Mapping[str, Any]) -> float:
    """What a wave length is multiplied by."""
    original = settings["original_max_position_embeddings"]
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    if wave < original / high:
        return 1.0
    if wave > original / low:
        return float(settings["factor"])
    blend = (original / wave - low) / (high - low)
    return float(1 / ((1 - blend) / settings["factor"] + blend))


def _numbers(keys: Keys, tensor: GGUFTensor, expected: int) -> tuple[float, ...]:
    """A small float32 tensor's numbers: the only ones that a config needs."""
    count = tensor.nbytes // 4
    if tensor.dtype != "F32" or tensor.shape != (expected,) or count > _MAX_FACTORS:
        raise ConfigFileError(
            f"{show(keys.file)}: {show(tensor.name)} is {tensor.dtype} {list(tensor.shape)}; rope "
            f"factors of this model are F32 [{expected}]",
            file=keys.file,
            tensor=tensor.name,
            offset=tensor.offset,
        )
    return struct.unpack(f"<{count}f", tensor.file.read(tensor.offset, tensor.nbytes))


def _unknown(header: GGUFHeader, architecture: str) -> ArchitectureError:
    names = sorted(GGUF_ARCHITECTURES)
    near = nearest(architecture, names, 1)
    hint = f"did you mean {near[0]}? " if near else ""
    return ArchitectureError(
        f"{show(header.file.name)} is of the GGUF architecture {show(architecture)}; loadkit-gguf "
        f"knows {', '.join(names)}",
        file=header.file.name,
        detail={"architecture": architecture, "known": names},
        hint=f"{hint}name a class that has a gguf_mapper: architecture='...'",
    )
