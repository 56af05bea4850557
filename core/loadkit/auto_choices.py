"""What a load decides where it is not told: its format, its dtype, its device."""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from loadkit import plugins
from loadkit.config_lookup import find_quantization
from loadkit.detect import (
    FORMAT_PATTERNS,
    Detected,
    detect_load_format,
    matching_formats,
    no_weights,
)
from loadkit.errors import ConfigFileError, LoadkitError, OptionError
from loadkit.text import printable

if TYPE_CHECKING:
    from loadkit.base_loader import BaseModelLoader
    from loadkit.config import LoadConfig, ModelConfig
    from loadkit.sources import Source

__all__ = ["device_of", "format_of", "with_dtype"]

log = logging.getLogger("loadkit")


def format_of(source: Source) -> tuple[str, str]:
    """The load format that a source's files are in, and why.

    Hook plugins are asked where the core does not know.

    Raises:
        NoWeightsError: nothing there that any format reads, or archives of ``torch.save`` alone and
            ``fall_back_to_pt`` is off.
    """
    listing, single = source.list(), getattr(source, "single", None)
    try:
        found = detect_load_format(listing, single=single)
    except LoadkitError:
        answer = plugins.call(
            "detect_load_format", source=source.uri, files=listing, model_config=None
        )
        if not answer:
            raise
        return str(answer), "a plugin recognised it"
    if found.load_format == "pt" and not source.load_config.fall_back_to_pt and single is None:
        raise no_weights(listing, "auto", FORMAT_PATTERNS["safetensors"])
    return named_by_config(source, found) or (found.load_format, found.why)


# Quantisation methods that are load formats too -> the formats whose files they read.
_OWN_FORMAT = {"bitsandbytes": ("safetensors", "pt"), "gguf": ("gguf",)}


def named_by_config(source: Source, found: Detected) -> tuple[str, str] | None:
    """The load format that config.json's quantisation needs, and why; None: the files' own."""
    from loadkit.hf_config import MAX_CONFIG_BYTES, HFConfig, parse_config

    if all(info.name != "config.json" for info in source.list()):
        return None
    opened = source.open("config.json")
    data = opened.read(0, min(opened.size, MAX_CONFIG_BYTES + 1))
    if b"quant_method" not in data:
        return None
    values = parse_config(data, file="config.json")
    stated = find_quantization(HFConfig.from_dict(values), file="config.json")
    method = None if stated is None else stated.get("quant_method")
    there = {found.load_format, *matching_formats(info.name for info in source.list())}
    if found.load_format == "sharded_state" or there.isdisjoint(_OWN_FORMAT.get(str(method), ())):
        return None
    if method == found.load_format:
        return None
    return str(method), f"config.json says quant_method {method!r}; {found.why}"


def device_of(device: Any, load_config: LoadConfig) -> str:
    """The device as torch spells it; cpu where none is named.

    Raises:
        OptionError: there is no such device here; says which there are.
    """
    name = str(device if device is not None else load_config.device or "cpu")
    there = {"cpu"}
    if torch.accelerator.is_available():
        kind = str(torch.accelerator.current_accelerator())
        there |= {kind, *(f"{kind}:{i}" for i in range(torch.accelerator.device_count()))}
    with suppress(RuntimeError):  # no device at all, as torch reads it
        found = torch.device(name)
        if found.type == "cpu":
            return "cpu"
        if str(found) in there:
            return name
    raise OptionError(
        f"device '{printable(name, 80)}' is not available here; available: "
        f"{', '.join(sorted(there))}"
    )


def with_dtype(model_config: ModelConfig, loader: BaseModelLoader) -> ModelConfig:
    """Dtype "auto" without a word in the config: what most of the checkpoint's bytes are in.

    Raises:
        ConfigFileError: no tensor of the checkpoint has a dtype that a model could have.
    """
    if model_config.dtype_name != "auto":
        return model_config
    bytes_of: dict[torch.dtype, int] = {}
    try:
        for _, tensor in loader.offers(model_config):
            dtype = tensor.dtype
            if dtype.is_floating_point:
                size = math.prod(tensor.shape) * dtype.itemsize
                bytes_of[dtype] = bytes_of.get(dtype, 0) + size
    except NotImplementedError:
        log.info("the loader has no catalogue to take the dtype from")
    wide = {dtype: size for dtype, size in bytes_of.items() if dtype.itemsize > 1}
    if not wide:
        raise ConfigFileError(
            f"neither {model_config.config_file} nor the checkpoint's tensors say which dtype the "
            "model has",
            file=model_config.config_file,
            hint="give dtype='bfloat16' or another",
        )
    best = max(wide, key=lambda dtype: wide[dtype])
    return model_config.with_dtype(str(best).removeprefix("torch."))
