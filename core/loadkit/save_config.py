"""What lies beside saved weights: config.json as the model is, and the source's other files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from loadkit.config import HFConfig, LoadkitConfig, ModelConfig
from loadkit.config_lookup import find_quantization, find_tie, nested_configs
from loadkit.errors import LoadkitError, OptionError, UsageError
from loadkit.frozen import thaw
from loadkit.sources import open_source
from loadkit.text import printable

if TYPE_CHECKING:
    from loadkit.origin import Origin
    from loadkit.sources.base import File, Source

__all__ = ["check_unquantised", "config_bytes", "config_of", "side_files", "stated_tie"]

_SIDE_FILES = frozenset(
    {
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "config_sentence_transformers.json",
        "generation_config.json",
        "merges.txt",
        "modules.json",
        "preprocessor_config.json",
        "processor_config.json",
        "sentence_bert_config.json",
        "sentencepiece.bpe.model",
        "special_tokens_map.json",
        "spiece.model",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
        "vocab.txt",
    }
)
# The modules of a sentence-transformers folder that modules.json names.
_MODULE_FILE = re.compile(r"\d{1,2}_[A-Za-z]{1,40}/(config\.json|model\.safetensors)")
_DTYPE_KEYS = ("dtype", "torch_dtype")


def config_of(model: nn.Module, config: Any, origin: Origin | None) -> dict[str, Any] | None:
    """The values of the config.json to write; None where nobody knows any.

    Args:
        model: the model; a Hugging Face one has a ``config`` with ``to_dict``.
        config: the caller's: a ``ModelConfig``, ``LoadkitConfig``, ``HFConfig``, a mapping, or
            anything with ``to_dict``.
        origin: what the model remembers; its overrides are in it.

    Raises:
        OptionError: ``config`` is none of these.
    """
    if config is not None:
        values = _plain(config)
        if values is None:
            raise OptionError(f"config is {type(config).__name__}; accepted: a config or a mapping")
    else:
        values = _plain(origin.config) if origin is not None else None
        values = values or _plain(getattr(model, "config", None))
        if not values:
            return None
        if origin is not None and origin.architecture:
            values["architectures"] = [origin.architecture]
    if not values.get("architectures"):
        values["architectures"] = [type(model).__name__]
    return values


def _plain(config: Any) -> dict[str, Any] | None:
    """A config in plain dictionaries, or None if it is no config."""
    if isinstance(config, LoadkitConfig):
        config = config.model_config
    if isinstance(config, ModelConfig):
        config = config.hf_config
    if isinstance(config, Mapping):
        return dict(thaw(config))
    own = getattr(config, "to_dict", None)
    values = own() if callable(own) else None
    return dict(values) if isinstance(values, Mapping) else None


def stated_tie(values: Mapping[str, Any] | None) -> bool | None:
    """What a config says of ``tie_word_embeddings``; None: nothing."""
    return None if values is None else find_tie(HFConfig.from_dict(values), file="config.json")


def config_bytes(values: dict[str, Any], *, dtype: str | None, tied: bool) -> bytes:
    """config.json with the dtype of the saved weights in it.

    Args:
        values: as ``config_of`` gave them.
        dtype: torch name of that dtype; None leaves what is there.
        tied: a tensor was left out because another parameter shares it, which a config that does
            not say so has to say.

    Raises:
        UsageError: a value that JSON does not have.
    """
    values = dict(values)
    config = HFConfig.from_dict(values)
    if dtype is not None:
        inner = [key for key, _ in nested_configs(config)]
        for node in (values, *(values[key] for key in inner)):
            node.update({key: dtype for key in _DTYPE_KEYS if key in node})
        if not any(key in values for key in _DTYPE_KEYS):
            values["torch_dtype"] = dtype
    if tied and find_tie(config, file="config.json") is None:
        values["tie_word_embeddings"] = True
    try:
        return (json.dumps(values, indent=2) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise UsageError(f"the config cannot be written as JSON: {error}") from error


def check_unquantised(values: dict[str, Any] | None, origin: Origin | None) -> None:
    """Refuse weights that are quantised in memory only, where no config could say so.

    Where one could (``QuantizationConfig.to_config``), ``values`` say so from now on.

    Raises:
        UsageError: QUANTIZED.
    """
    method = origin.config.quant_config if origin is not None else None
    if method is None or values is None:
        return
    if find_quantization(HFConfig.from_dict(values), file="config.json") is None:
        stated = method.to_config()
        if stated is not None:
            values["quantization_config"] = dict(stated)
            return
        raise UsageError(
            f"the weights are held as {printable(method.get_name())} blocks, which config.json "
            "cannot say",
            code="QUANTIZED",
            hint="load the checkpoint without quantization=: then its numbers are decoded",
        )


@contextmanager
def side_files(origin: Origin | None) -> Iterator[tuple[list[tuple[str, File]], dict[str, str]]]:
    """The source's tokenizer and generation files, open, and those that cannot be had, with why.

    A source that is gone has none. What lies beside a single file is taken only if config.json,
    too, was read there: beside a GGUF file it may be anybody's.
    """
    found: list[tuple[str, File]] = []
    refused: dict[str, str] = {}
    config = origin.config.model_config if origin is not None else None
    if origin is None or config is None or not config.source:
        yield found, refused
        return
    try:
        source = open_source(config.source, origin.config.load_config)
    except LoadkitError as error:
        yield found, {config.source: error.message}
        return
    with source:
        if getattr(source, "single", None) is None or config.config_file.endswith(".json"):
            _open_all(source, found, refused)
        yield found, refused


def _open_all(source: Source, found: list[tuple[str, File]], refused: dict[str, str]) -> None:
    for info in source.list():
        if info.name in _SIDE_FILES or _MODULE_FILE.fullmatch(info.name):
            try:
                found.append((info.name, source.open(info.name)))
            except LoadkitError as error:
                refused[info.name] = error.message
