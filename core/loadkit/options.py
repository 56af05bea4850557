"""What an option is: a name, a type, a default, a line of help, and how a value is checked.

The fields of ``LoadConfig`` and the keys a loader takes in ``model_loader_extra_config`` are
declared the same way, checked by the same code and refused with the same words.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from loadkit.errors import FormatError, OptionError
from loadkit.frozen import FrozenDict, freeze
from loadkit.json_safe import parse_json
from loadkit.text import nearest, printable

__all__ = ["OptionSpec", "option", "unknown_option", "validate_extra_config", "validate_options"]

_MAX_JSON = 1 << 20  # bytes of JSON text in an option
_WORDS = {"true": True, "yes": True, "on": True, "1": True}
_WORDS |= {"false": False, "no": False, "off": False, "0": False}
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_NUMBER = re.compile(r"([+-]?\d{1,30})(?:([KMGT])(?:i?B)?)?")
_TYPE_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    Path: "a path",
    tuple: "a list of strings",
    dict: "an object",
}


Kind: TypeAlias = type[Any]  # in OptionSpec ``type`` is a field


@dataclass(frozen=True, slots=True)
class OptionSpec:
    """One option.

    Attributes:
        name: its key.
        type: ``bool``, ``int``, ``float``, ``str``, ``pathlib.Path`` (kept as a string, ``~``
            expanded), ``tuple`` (of strings) or ``dict``; or several of those.
        default: its value where none is given. Where it is None, None is accepted.
        help: one line.
        choices: the only strings accepted, if not empty.
        low: least number accepted.
        high: greatest number accepted.
        pattern: what a string must match in full.
    """

    name: str
    type: Kind | tuple[Kind, ...]
    default: Any = None
    help: str = ""
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    pattern: str | None = None

    @property
    def types(self) -> tuple[Kind, ...]:
        """The accepted types, as a tuple."""
        return self.type if isinstance(self.type, tuple) else (self.type,)

    @property
    def accepted(self) -> str:
        """The accepted values, in words."""
        words = " or ".join(_TYPE_NAMES.get(kind, kind.__name__) for kind in self.types)
        if self.choices:
            words = ", ".join(map(repr, self.choices))
        elif self.low is not None or self.high is not None:
            low = "" if self.low is None else f" from {self.low}"
            words += low + ("" if self.high is None else f" to {self.high}")
        return f"{words}, or None" if self.default is None else words

    def check(self, value: Any, *, owner: str) -> Any:
        """``value``, normalised and frozen.

        Args:
            value: what was given.
            owner: what the option belongs to, for the error: ``LoadConfig``.

        Raises:
            OptionError: wrong type, out of range, or none of the choices.
        """
        if value is None and self.default is None:
            return None
        for kind in self.types:
            found = _as(kind, value)
            if found is not None:
                self._check_range(found, value, owner)
                return found
        raise self.refused(value, owner, f"is {_kind(value)}")

    def parse(self, text: str, *, owner: str) -> Any:
        """The value that command line text spells, checked.

        Lists are JSON or split at commas, objects are JSON, sizes may end in KiB, MiB or GiB,
        ``none`` is None where None is accepted.
        """
        if self.default is None and text.strip().lower() in ("none", "null"):
            return None
        is_object = dict in self.types and text.lstrip().startswith("{")
        for kind in (dict,) if is_object else self.types:
            value = _from_text(kind, text)
            if value is not None:
                return self.check(value, owner=owner)
        if {dict, tuple} & set(self.types) and text.lstrip()[:1] in ("{", "["):
            json_value(text, f"{owner}.{self.name}")  # raises, saying where the text is no JSON
        raise self.refused(text, owner, "cannot be read")

    def refused(self, value: Any, owner: str, problem: str) -> OptionError:
        """The error about ``value``."""
        near = nearest(value, self.choices, 1) if isinstance(value, str) else []
        hint = f"; did you mean {near[0]!r}?" if near else ""
        shown = printable(repr(value) if not isinstance(value, str) else f"'{value}'", 120)
        return OptionError(
            f"{owner}.{self.name} = {shown} {problem}; accepted: {self.accepted}{hint}",
            detail={
                "option": self.name,
                "value": shown,
                "accepted": list(self.choices) or self.accepted,
                "nearest": near,
            },
        )

    def _check_range(self, found: Any, value: Any, owner: str) -> None:
        if self.choices and found not in self.choices:
            raise self.refused(value, owner, "is not known")
        if isinstance(found, str) and not found:
            raise self.refused(value, owner, "is empty")
        if self.pattern and isinstance(found, str) and not re.fullmatch(self.pattern, found):
            raise self.refused(value, owner, f"does not match {self.pattern}")
        if isinstance(found, (int, float)) and not isinstance(found, bool):
            low, high = self.low, self.high
            if (low is not None and found < low) or (high is not None and found > high):
                raise self.refused(value, owner, "is out of range")


def _as(kind: type, value: Any) -> Any:
    """``value`` as ``kind``, or None where it is something else."""
    if kind is tuple:
        items = (value,) if isinstance(value, (str, os.PathLike)) else value
        if not isinstance(items, (list, tuple, set, frozenset)):
            return None
        items = sorted(items) if isinstance(items, (set, frozenset)) else items
        texts = tuple(os.fspath(item) if isinstance(item, os.PathLike) else item for item in items)
        return texts if all(isinstance(item, str) and item for item in texts) else None
    if kind is dict:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            return None
        return freeze(value)
    if kind is Path:
        if not isinstance(value, (str, os.PathLike)):
            return None
        text = os.fspath(value)
        return os.path.expanduser(text) if isinstance(text, str) else None  # noqa: PTH111
    if kind is float:
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        return float(value) if good and math.isfinite(value) else None
    if kind is int and isinstance(value, bool):
        return None
    return value if isinstance(value, kind) else None


def _from_text(kind: type, text: str) -> Any:
    """Command line text as ``kind``, or None."""
    word = text.strip()
    if kind is bool:
        return _WORDS.get(word.lower())
    if kind is int:
        number = _NUMBER.fullmatch(word)
        return int(number[1]) * _UNITS[number[2] or ""] if number else None
    if kind is float:
        try:
            return float(word)
        except ValueError:
            return None
    if kind in (dict, tuple) and word[:1] in ("{", "["):
        try:
            value = json_value(word, "option")
        except OptionError:
            return None
        return value if isinstance(value, dict if kind is dict else list) else None
    if kind is tuple:
        return [item.strip() for item in word.split(",") if item.strip()]
    return None if kind is dict else text


def json_value(text: str, name: str) -> Any:
    """JSON from the caller's text.

    Raises:
        OptionError: it is none; shows the text and where it goes wrong.
    """
    try:
        data = text.encode("utf-8", "surrogatepass")
        return parse_json(data, file=name, max_bytes=_MAX_JSON)
    except FormatError as problem:
        shown = printable(text, 120)
        raise OptionError(
            f"{problem.message}; the text is: {shown}", offset=problem.offset
        ) from None


def option(
    kind: type | tuple[type, ...],
    default: Any,
    text: str,
    *,
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
    pattern: str | None = None,
) -> Any:
    """A dataclass field that is an option; its name is the field's."""
    spec = OptionSpec("", kind, default, text, choices, low, high, pattern)
    return field(default=default, metadata={"option": spec})


def unknown_option(name: str, accepted: Any, owner: str) -> OptionError:
    """The error for an option nobody takes: it lists the accepted ones and the nearest."""
    names = sorted(accepted)
    near = nearest(name, names)
    hint = f"did you mean {near[0]!r}? " if near else ""
    takes = f"it takes: {', '.join(names)}" if names else "it takes no options"
    return OptionError(
        f"{owner} has no option '{printable(name, 80)}'; {hint}{takes}",
        detail={"option": printable(name), "accepted": names, "nearest": near},
    )


def validate_extra_config(
    options: Mapping[str, OptionSpec], given: Mapping[str, Any] | str | None, load_format: str
) -> FrozenDict:
    """``model_loader_extra_config`` as a loader that declares ``options`` takes it.

    Args:
        options: what the loader accepts, by name.
        given: what the user gave: a mapping, or JSON text.
        load_format: the loader's name, for errors.

    Returns:
        Every option of ``options`` with the given or the default value.

    Raises:
        OptionError: unknown key (with the accepted and the nearest), wrong type, out of range.
    """
    owner = f"model_loader_extra_config of load format '{printable(load_format, 64)}'"
    found: Any = given
    if isinstance(given, str):
        found = json_value(given, "model_loader_extra_config")
    return validate_options(options, found, owner)


def validate_options(
    options: Mapping[str, OptionSpec], given: Mapping[str, Any] | None, owner: str
) -> FrozenDict:
    """Given values as somebody who declares ``options`` takes them, with the defaults of the rest.

    Raises:
        OptionError: unknown key (with the accepted and the nearest), wrong type, out of range.
    """
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        raise OptionError(f"{owner} is {_kind(given)}; accepted: an object")
    for name in given:
        if name not in options:
            raise unknown_option(str(name), options, owner)
    return FrozenDict(
        {
            name: spec.check(given[name], owner=owner) if name in given else freeze(spec.default)
            for name, spec in options.items()
        }
    )


def _kind(value: Any) -> str:
    """What a value is, for an error."""
    names = {type(None): "null", str: "a string", list: "a list", dict: "an object"}
    names |= {bool: "a boolean", int: "an integer", float: "a number"}
    return names.get(type(value), f"of type {type(value).__name__}")
