"""Reads fields of a config.json that a model is built from; a bad one is an error that names it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from loadkit.config import HFConfig
from loadkit.errors import ConfigFileError

__all__ = ["count", "flag", "optional_real", "real", "text", "with_defaults"]

MAX_COUNT = 1 << 31  # of anything a config counts: layers, heads, widths, tokens


def with_defaults(config: HFConfig, defaults: Mapping[str, Any]) -> HFConfig:
    """The config with ``defaults`` for keys that are not there; null is there."""
    return HFConfig.from_dict({**defaults, **config.to_dict()}) if defaults else config


def count(config: Any, name: str, default: int | None = None, *, least: int = 1) -> int:
    """A whole number from ``least`` to ``MAX_COUNT``; ``default`` where it is absent or null.

    Raises:
        ConfigFileError: E_CONFIG, it is missing (no default) or no such number.
    """
    value = _field(config, name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_COUNT:
        raise ConfigFileError(
            f"config.json: {name} is {value!r}, not a count of {least} to {MAX_COUNT}"
        )
    return value


def real(
    config: Any, name: str, default: float | None = None, *, above: float | None = None
) -> float:
    """A finite number (more than ``above``); ``default`` where it is absent or null.

    Raises:
        ConfigFileError: E_CONFIG, it is missing (no default) or no such number.
    """
    value = _field(config, name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigFileError(f"config.json: {name} is {value!r}, not a finite number")
    if above is not None and value <= above:
        raise ConfigFileError(f"config.json: {name} is {value!r}, not above {above:g}")
    return float(value)


def optional_real(config: Any, name: str, *, above: float | None = None) -> float | None:
    """A finite number (more than ``above``); None where it is absent or null.

    Raises:
        ConfigFileError: E_CONFIG, it is no such number.
    """
    return None if getattr(config, name, None) is None else real(config, name, above=above)


def flag(config: Any, name: str, default: bool = False) -> bool:
    """True or false; ``default`` where it is absent or null.

    Raises:
        ConfigFileError: E_CONFIG, it is something else.
    """
    value = _field(config, name, default)
    if not isinstance(value, bool):
        raise ConfigFileError(f"config.json: {name} is {value!r}, not true or false")
    return value


def text(config: Any, name: str, default: str) -> str:
    """A string; ``default`` where it is absent or null.

    Raises:
        ConfigFileError: E_CONFIG, it is something else.
    """
    value = _field(config, name, default)
    if not isinstance(value, str):
        raise ConfigFileError(f"config.json: {name} is {value!r}, not a string")
    return value


def _field(config: Any, name: str, default: object) -> object:
    value = getattr(config, name, None)
    if value is None:
        value = default
    if value is None:
        raise ConfigFileError(f"config.json has no {name}, which the model needs")
    return value
