"""Where in a config the answers lie: architectures, dtype, tying, quantisation, the text model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from loadkit.dtypes import dtype_name
from loadkit.errors import ArchitectureError, ConfigFileError, OptionError
from loadkit.frozen import FrozenDict, freeze, thaw
from loadkit.hf_config import TEXT_CONFIG_KEYS, HFConfig, bad_value
from loadkit.text import printable

__all__ = [
    "find_architectures",
    "find_dtype",
    "find_quantization",
    "find_tie",
    "merge_overrides",
    "stated_architectures",
    "text_config",
]

MAX_ARCHITECTURES = 64
MAX_NAME = 256  # characters of an architecture's or a method's name

_QUANTIZATION_KEYS = ("quantization_config", "compression_config")
_METHOD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+\-]{0,63}")
_MAX_QUANTIZATION_VALUES = 100_000
_BITS = ("bits", "w_bit", "num_bits")
_GROUPS = ("group_size", "q_group_size")


def merge_overrides(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with ``overrides`` in them: nested objects merge, ``a.b`` is b inside a.

    Raises:
        OptionError: a dotted key leads through something that is no object.
    """
    merged: dict[str, Any] = thaw(values)
    waiting = [(merged, key, value, key) for key, value in overrides.items()]
    while waiting:
        node, key, value, path = waiting.pop(0)
        *outer, last = key.split(".") if key not in node else [key]
        for part in outer:
            inner = node.setdefault(part, {})
            if not isinstance(inner, dict):
                raise OptionError(
                    f"hf_overrides: {printable(path)!r} leads through {printable(part)!r}, which "
                    f"is {printable(repr(inner), 80)} and no object"
                )
            node = inner
        if isinstance(value, Mapping) and isinstance(node.get(last), dict):
            waiting += [(node[last], k, v, f"{path}.{k}") for k, v in value.items()]
        else:
            node[last] = thaw(value)
    return merged


def nested_configs(config: HFConfig) -> Iterator[tuple[str, HFConfig]]:
    """The text model's config inside a composed one, under each name it goes by."""
    for key in TEXT_CONFIG_KEYS:
        inner = config.get(key)
        if isinstance(inner, HFConfig):
            yield key, inner


def _levels(config: HFConfig) -> list[tuple[str, HFConfig]]:
    """The config and then the text models' inside it, each with its dotted prefix."""
    return [("", config), *((f"{key}.", inner) for key, inner in nested_configs(config))]


def text_config(config: HFConfig) -> HFConfig:
    """The text model's config: a nested one that describes a model, else ``config``."""
    for _, inner in nested_configs(config):
        if "hidden_size" in inner or "num_hidden_layers" in inner or "model_type" in inner:
            return inner
    return config


def find_dtype(config: HFConfig, *, file: str) -> str | None:
    """The dtype a config states, outside or in its text model; None without one.

    Raises:
        ConfigFileError: it is no dtype's name.
    """
    for path, node in (
        ("", config),
        *((f"{key}.", inner) for key, inner in nested_configs(config)),
    ):
        for key in ("dtype", "torch_dtype"):
            value = node.get(key)
            if value is not None and value != "auto":
                what = f"{file}: {path}{key}"
                return dtype_name(value, what=what, error=ConfigFileError, file=file)
    return None


def find_tie(config: HFConfig, *, file: str) -> bool | None:
    """What a config says of tied embeddings; the text model's own word counts first."""
    for path, node in (
        *((f"{key}.", inner) for key, inner in nested_configs(config)),
        ("", config),
    ):
        value = node.get("tie_word_embeddings")
        if value is None:
            continue
        if not isinstance(value, bool):
            raise bad_value(f"{path}tie_word_embeddings", value, "true or false", file=file)
        return value
    return None


def find_quantization(config: HFConfig, *, file: str) -> FrozenDict | None:
    """A config's quantisation, checked and frozen. Its method is a name: never imported."""
    for path, node in (
        ("", config),
        *((f"{key}.", inner) for key, inner in nested_configs(config)),
    ):
        for key in _QUANTIZATION_KEYS:
            value = node.get(key)
            if value is not None:
                return _checked_quantization(value, path + key, file)
    return None


def _checked_quantization(value: Any, path: str, file: str) -> FrozenDict:
    if not isinstance(value, HFConfig):
        raise bad_value(path, value, "an object", file=file)
    for key in ("quant_method", "quant_algo"):
        method = value.get(key)
        if method is not None and not (isinstance(method, str) and _METHOD.fullmatch(method)):
            accepted = "the plain name of a quantisation method"
            raise bad_value(f"{path}.{key}", method, accepted, file=file)
    waiting: list[tuple[str, Any]] = [(path, value)]
    seen = 0
    while waiting:
        at, node = waiting.pop()
        children: list[tuple[Any, Any]]
        children = node.items() if isinstance(node, HFConfig) else list(enumerate(node))
        for key, item in children:
            seen += 1
            _check_quantization_value(str(key), item, f"{at}.{key}", file)
            if isinstance(item, (HFConfig, list)):
                waiting.append((f"{at}.{key}", item))
        if seen > _MAX_QUANTIZATION_VALUES:
            raise ConfigFileError(
                f"{file}: {path!r} holds more than {_MAX_QUANTIZATION_VALUES} values", file=file
            )
    found = freeze(value.to_dict())
    return found if isinstance(found, FrozenDict) else FrozenDict()


def _check_quantization_value(key: str, value: Any, path: str, file: str) -> None:
    """Bits and group sizes that some method can have."""
    if value is None or isinstance(value, (HFConfig, list)):
        return
    number = value if isinstance(value, int) and not isinstance(value, bool) else None
    if key in _BITS and (number is None or not 1 <= number <= 64):
        raise bad_value(path, value, "an integer from 1 to 64", file=file)
    if key in _GROUPS and (number is None or not (number == -1 or 1 <= number <= 1 << 24)):
        raise bad_value(path, value, "-1, or an integer from 1 to 2^24", file=file)


def stated_architectures(config: Mapping[str, Any] | HFConfig) -> tuple[str, ...]:
    """The architectures a config states at its top level; empty where it states none right."""
    value = config.get("architectures")
    if not isinstance(value, (list, tuple)) or len(value) > MAX_ARCHITECTURES:
        return ()
    good = all(isinstance(name, str) and 0 < len(name) <= MAX_NAME for name in value)
    return tuple(value) if good else ()


def find_architectures(config: HFConfig, asked: str | None, *, file: str) -> tuple[str, ...]:
    """The architectures to try.

    Raises:
        ArchitectureError: none is stated; one message for every way of that.
    """
    if asked:
        return (asked,)
    stated = stated_architectures(config)
    if stated:
        return stated
    found = _what_was_found(config)
    hints, suggested = _suggestions(config)
    raise ArchitectureError(
        f"{printable(file, ascii_only=False)} names no architecture: {found}",
        file=file,
        detail={"found": found, "suggested": suggested},
        hint="; ".join([*hints, "name it: architecture='...'"]),
    )


def _what_was_found(config: HFConfig) -> str:
    if "architectures" not in config:
        return "there is no 'architectures'"
    value = config["architectures"]
    shown = "null" if value is None else printable(repr(value), 80)
    return f"'architectures' is {shown}, not a list of names"


def _suggestions(config: HFConfig) -> tuple[list[str], list[str]]:
    """What may have been meant, in words and as names."""
    hints: list[str] = []
    suggested: list[str] = []
    for key, inner in nested_configs(config):
        for name in stated_architectures(inner):
            hints.append(f"its {key} names {printable(name, 80)!r}")
            suggested.append(name)
    kind = config.get("model_type")
    if isinstance(kind, str) and kind:
        from loadkit.model_registry import architectures_of

        names = architectures_of(kind)
        shown = f"model_type {printable(kind, 80)!r}"
        if len(names) == 1:
            hints.append(f"{shown} is {names[0]!r}")
            suggested.append(names[0])
        elif names:
            hints.append(f"{shown} may be {', '.join(map(repr, names[:5]))}")
    return hints, suggested
