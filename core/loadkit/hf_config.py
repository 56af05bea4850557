"""config.json as an object with attributes, checked before anybody computes with it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from loadkit.errors import ConfigFileError
from loadkit.frozen import thaw
from loadkit.json_safe import parse_json
from loadkit.text import printable

__all__ = ["CONFIG_LIMITS", "MAX_CONFIG_BYTES", "TEXT_CONFIG_KEYS", "HFConfig", "parse_config"]

MAX_CONFIG_BYTES = 32 << 20
MAX_CONFIG_VALUES = 2_000_000  # entries of all objects and lists together

# Where the text model of a composed config lies.
TEXT_CONFIG_KEYS = ("text_config", "language_config", "llm_config")

# Integer keys, least and greatest value; null counts as absent, a list as one value per layer.
CONFIG_LIMITS: dict[str, tuple[int, int]] = {
    "hidden_size": (1, 1 << 24),
    "intermediate_size": (0, 1 << 26),
    "moe_intermediate_size": (0, 1 << 26),
    "num_hidden_layers": (0, 100_000),
    "num_attention_heads": (0, 1 << 20),
    "num_key_value_heads": (0, 1 << 20),
    "head_dim": (1, 1 << 20),
    "vocab_size": (0, 1 << 31),
    "type_vocab_size": (0, 1 << 31),
    "max_position_embeddings": (-1, 1 << 40),
    "num_experts": (0, 1 << 20),
    "num_local_experts": (0, 1 << 20),
    "num_experts_per_tok": (0, 1 << 20),
}
_FLOATS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "rope_theta")


class HFConfig:
    """config.json as attributes, nested objects too (``hf_config.text_config.hidden_size``).

    It reads as a mapping as well (``config["rope_scaling"].get("factor")``). A key that is also a
    method's name is reached by index only.
    """

    __slots__ = ("_values",)
    _values: dict[str, Any]

    def __init__(self, **values: Any) -> None:
        wrapped = {key: _wrap(value) for key, value in values.items()}
        object.__setattr__(self, "_values", wrapped)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> HFConfig:
        """The config that ``values`` describes; its nested mappings become configs."""
        made = cls()
        for key, value in values.items():
            made._values[key] = _wrap(value)
        return made

    def to_dict(self) -> dict[str, Any]:
        """A copy in plain dictionaries and lists."""
        return {key: _unwrap(value) for key, value in self._values.items()}

    def get(self, key: str, default: Any = None) -> Any:
        """The value of ``key``, or ``default``."""
        return self._values.get(key, default)

    def keys(self) -> list[str]:
        """All keys, in the file's order."""
        return list(self._values)

    def items(self) -> list[tuple[str, Any]]:
        """All keys with their values."""
        return list(self._values.items())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_values":
            raise AttributeError(name)
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(f"the model's config has no {printable(name)!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._values[name] = _wrap(value)

    def __delattr__(self, name: str) -> None:
        if name not in self._values:
            raise AttributeError(name)
        del self._values[name]

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self._values)

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HFConfig) and self._values == other._values

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"HFConfig({printable(repr(self.to_dict()), 500)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (HFConfig.from_dict, (self.to_dict(),))


def _wrap(value: Any) -> Any:
    """Mappings as configs, also inside lists."""
    if isinstance(value, HFConfig):
        return value
    if isinstance(value, Mapping):
        return HFConfig.from_dict(value)
    if isinstance(value, (list, tuple)):
        return [_wrap(item) for item in value]
    return value


def _unwrap(value: Any) -> Any:
    if isinstance(value, HFConfig):
        return value.to_dict()
    if isinstance(value, list):
        return [_unwrap(item) for item in value]
    return thaw(value)


def parse_config(data: bytes, *, file: str = "config.json") -> dict[str, Any]:
    """The object in a config file's bytes.

    ``Infinity`` and ``NaN`` are read: published configs hold them.

    Raises:
        ConfigFileError: not JSON, no object, or out of bounds; ``detail["rule"]`` says which.
    """
    found = parse_json(
        data, file=file, max_bytes=MAX_CONFIG_BYTES, allow_nan=True, error=ConfigFileError
    )
    if not isinstance(found, dict):
        kind = "null" if found is None else type(found).__name__
        raise ConfigFileError(f"{file} holds no object but {kind}", file=file)
    return found


def check_config(values: Mapping[str, Any], *, file: str) -> None:
    """Refuse numbers no model can have, at every level of nesting.

    Raises:
        ConfigFileError: names the key (dotted), the value and what is accepted.
    """
    seen = 0
    waiting: list[tuple[str, Any]] = [("", values)]
    while waiting:
        path, node = waiting.pop()
        children = node.items() if isinstance(node, Mapping) else enumerate(node)
        for key, value in children:
            seen += 1
            if isinstance(node, Mapping):
                _check_value(str(key), value, path + str(key), file)
            if isinstance(value, (Mapping, list, tuple)):
                waiting.append((f"{path}{key}.", value))
        if seen > MAX_CONFIG_VALUES:
            raise ConfigFileError(f"{file} holds more than {MAX_CONFIG_VALUES} values", file=file)


def _check_value(key: str, value: Any, path: str, file: str) -> None:
    """One value of a key that models compute with."""
    if key in CONFIG_LIMITS and value is not None:
        low, high = CONFIG_LIMITS[key]
        for each in value if isinstance(value, list) else [value]:
            is_int = isinstance(each, int) and not isinstance(each, bool)
            if each is not None and (not is_int or not low <= each <= high):
                accepted = f"an integer from {low} to {high}"
                raise bad_value(path, value, accepted, file=file)
    if key in _FLOATS and value is not None and not isinstance(value, Mapping):
        for each in value if isinstance(value, list) else [value]:
            number = isinstance(each, (int, float)) and not isinstance(each, bool)
            if not number or not 0 <= each <= sys.float_info.max:
                raise bad_value(path, value, "a finite number of at least 0", file=file)


def bad_value(key: str, value: Any, accepted: str, *, file: str) -> ConfigFileError:
    """The error for a key whose value cannot be."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        shown = f"an integer of {value.bit_length()} bits"
    else:
        shown = printable(repr(value), 120)
    return ConfigFileError(
        f"{printable(file, ascii_only=False)}: {printable(key)!r} is {shown}; accepted: {accepted}",
        file=file,
        detail={"key": printable(key), "value": shown, "accepted": accepted},
    )
