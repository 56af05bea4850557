"""Reads fields of a config.json that a model is built from; a bad one is an error that names it."""

from __future__ import annotations

import math
from typing import Any

from loadkit.errors import ConfigFileError

__all__ = ["count", "flag", "real", "text"]

MAX_COUNT = 1 << 31  # of anything a config counts: layers, heads, widths, tokens


def count(config: Any, name: str, default: int | None = None) -> int:
    """A whole number from 1 to ``MAX_COUNT``; ``default`` where it is absent or null.

    Raises:
        ConfigFileError: E_CONFIG, it is missing (no default) or no such number.
    """
    value = _field(config, name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_COUNT:
        raise ConfigFileError(f"config.json: {name} is {value!r}, not a count of 1 to {MAX_COUNT}")
    return value


def real(config: Any, name: str, default: float | None = None) -> float:
    """A finite number; ``default`` where it is absent or null.

    Raises:
        ConfigFileError: E_CONFIG, it is missing (no default) or no such number.
    """
    value = _field(config, name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigFileError(f"config.json: {name} is {value!r}, not a finite number")
    return float(value)


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
