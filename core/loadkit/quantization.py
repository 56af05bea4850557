"""The seam where quantisation methods plug in: what a method is, and how a checkpoint names one.

A layer asks its ``QuantizationConfig`` for a method; the method makes the layer's parameters,
applies them and post-processes them once they are loaded. Configs are found by name in a table
(``register_quantization_config``, entry points ``loadkit.quantization``), never by a module path
that a file brings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from loadkit import plugins
from loadkit.errors import ConfigFileError, LoadkitError, OptionError, UnknownNameError
from loadkit.quantization_base import (
    FusedMoEMethodBase,
    LinearMethodBase,
    QuantizationConfig,
    QuantizeMethodBase,
)
from loadkit.text import printable

if TYPE_CHECKING:
    import torch

    from loadkit.config import LoadConfig, ModelConfig
    from loadkit.sources.base import Source

__all__ = [
    "FusedMoEMethodBase",
    "LinearMethodBase",
    "QuantizationConfig",
    "QuantizeMethodBase",
    "check_act_dtype",
    "configure_quant_config",
    "get_quant_config",
    "get_quantization_config",
    "method_has_implemented_embedding",
    "register_quantization_config",
]


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+\-]{0,63}")

ConfigClass = TypeVar("ConfigClass", bound=type[QuantizationConfig])


def register_quantization_config(
    name: str, *, override: bool = False
) -> Callable[[ConfigClass], ConfigClass]:
    """Register a ``QuantizationConfig`` class under a method's name.

    Raises:
        OptionError: no usable name, or what is decorated is no such class.
        ConflictError: the name is taken, and ``override`` is not given.
    """
    from loadkit.tables import quantization

    def register(cls: ConfigClass) -> ConfigClass:
        quantization.register(name, cls, override=override)
        return cls

    return register


def get_quantization_config(name: str) -> type[QuantizationConfig]:
    """The class registered for a method's name; imports only that one.

    Raises:
        UnknownNameError: no installed distribution has it; names the nearest.
        NotInstalledError: a known method whose distribution is missing; says the pip line.
    """
    from loadkit.tables import quantization

    # The table refuses what is not a subclass of it.
    return cast("type[QuantizationConfig]", quantization.lookup(name))


def method_has_implemented_embedding(method: QuantizeMethodBase) -> bool:
    """Whether a method can look rows up, which a vocabulary layer needs."""
    return type(method).embedding is not QuantizeMethodBase.embedding


def get_quant_config(
    model_config: ModelConfig, load_config: LoadConfig, *, source: Source | None = None
) -> QuantizationConfig | None:
    """The quantisation of a checkpoint, or None if it has none.

    It is looked for in this order: config.json's ``quantization_config`` or
    ``compression_config``, of the text model too, with ``hf_overrides`` applied; the method's own
    files in the checkpoint (``quantize_config.json``, ...), if ``source`` is given; then what the
    caller asked for (``quantization=``, or load format ``bitsandbytes``), which quantises an
    unquantised checkpoint while it is loaded. Where none of them names a method, hook plugins are
    asked (``loadkit_detect_quantization``), and the method they name looks for its own files.

    Raises:
        ConfigFileError: E_CONFIG, the method is unknown, not the one asked for, or its values are
            bad. A method is a name in a table: nothing that a file names is imported.
        OptionError: the model's dtype is none the method works with.
        NotInstalledError: a known method whose distribution is missing.
    """
    asked = model_config.quantization
    if asked is None and load_config.load_format == "bitsandbytes":
        asked = "bitsandbytes"
    found: tuple[Mapping[str, Any], str] | None = None
    if model_config.quantization_config is not None:
        found = model_config.quantization_config, model_config.config_file
    elif source is not None:
        found = _from_files(source, asked)
    if asked is None and (found is None or not {"quant_method", "quant_algo"} & found[0].keys()):
        asked = plugins.call(
            "detect_quantization", hf_config=model_config.hf_config, model_config=model_config
        )
        if asked is None and found is None:
            return None
        if found is None and source is not None:
            found = _from_files(source, asked)
    values, file = found if found is not None else ({}, None)
    cls = _config_class(values, file, asked)
    if found is not None and not _is_callers(model_config):
        cls.check_load_format(values, load_config.load_format, file=file)
    try:
        config = cls.from_config(values)
    except LoadkitError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigFileError(
            f"quantisation method {cls.get_name()!r} cannot use its config: "
            f"{type(error).__name__}: {printable(error)}",
            file=file,
        ) from error
    check_act_dtype(cls, model_config)
    return config


def configure_quant_config(
    quant_config: QuantizationConfig | None, model_cls: type[torch.nn.Module]
) -> None:
    """Tell a quantisation config which modules the model's class fuses."""
    if quant_config is not None:
        packed = getattr(model_cls, "packed_modules_mapping", None) or {}
        quant_config.packed_modules_mapping = {key: list(value) for key, value in packed.items()}


def _is_callers(model_config: ModelConfig) -> bool:
    """Whether the caller wrote the config's description of its quantisation."""
    keys = {part for key in model_config.hf_overrides for part in key.split(".")}
    return not keys.isdisjoint(("quantization_config", "compression_config"))


# A file that holds a quantisation's config -> the method, where the file does not say.
_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}


def _from_files(source: Source, asked: str | None) -> tuple[dict[str, Any], str] | None:
    """The first config in a file of its own: (values, file name)."""
    from loadkit.hf_config import parse_config

    wanted = (
        list(_FILES) if asked is None else get_quantization_config(asked).get_config_filenames()
    )
    present = {info.name for info in source.list()}
    for name in wanted:
        if name in present:
            opened = source.open(name)
            values = parse_config(opened.read(0, opened.size), file=name)
            if name in _FILES:
                values.setdefault("quant_method", _FILES[name])
            return values, name
    return None


def _config_class(
    values: Mapping[str, Any], file: str | None, asked: str | None
) -> type[QuantizationConfig]:
    """The class for the method a config names, or for the one asked for."""
    named = values.get("quant_method")
    if named is None and "quant_algo" in values:
        named = "modelopt"
    if named is None and asked is None:
        raise ConfigFileError(
            f"{file} describes a quantisation without its quant_method; it has {sorted(values)}",
            file=file,
            hint="name it: quantization='...'",
        )
    if named is not None and not (isinstance(named, str) and _NAME.fullmatch(named)):
        raise ConfigFileError(
            f"{file}: quant_method is {printable(repr(named), 80)}, which is no method's name",
            file=file,
        )
    if asked is not None and named not in (None, asked):
        cls = get_quantization_config(asked)
        if cls.override_quantization_method(values, asked) != asked:
            raise ConfigFileError(
                f"{file} says quantisation {named!r}, and {asked!r} was asked for",
                file=file,
                detail={"found": named, "asked": asked},
                hint=f"leave quantization out, or give {named!r}",
            )
        return cls
    if named is None and asked is not None:
        return get_quantization_config(asked)
    try:
        return get_quantization_config(str(named))
    except UnknownNameError as error:
        raise ConfigFileError(f"{file}: {error}", file=file) from error


def check_act_dtype(cls: type[QuantizationConfig], model_config: ModelConfig) -> None:
    """Refuse a model dtype that the method does not compute in.

    Raises:
        OptionError: it is none of ``cls.get_supported_act_dtypes()``.
    """
    if model_config.dtype_name == "auto":
        return
    good = cls.get_supported_act_dtypes()
    if good and model_config.dtype not in good:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in good)
        raise OptionError(
            f"quantisation {cls.get_name()!r} works in {names}, not in {model_config.dtype_name}",
            hint="give dtype=" + repr(names.split(", ", maxsplit=1)[0]),
        )
