"""Tensor names: a text, or, from nested state dicts, a path of keys and positions.

A path is a record separator (byte 30) and a JSON array: ``["model","layers",0,"weight"]``. It
becomes the dotted name that a state dict would have; two tensors of one name are refused, and so
is a path that is both a tensor and a folder of tensors.
"""

from __future__ import annotations

import json
import unicodedata
from typing import Any, NoReturn

from loadkit_tensorizer.limits import MAX_NAME_BYTES, MAX_PATH

__all__ = ["BadNameError", "Names", "parse_name"]

Path = tuple["str | int", ...]

_SEPARATOR = 0x1E
_MAX_POSITION = 2**31


class BadNameError(ValueError):
    """What is wrong with a name, for the error that says where."""


def parse_name(raw: bytes) -> Path:
    """A stored name as a path; a plain name is a path of one part.

    Raises:
        BadNameError: it breaks a rule.
    """
    if not raw:
        raise BadNameError("is empty")
    if len(raw) > MAX_NAME_BYTES:
        raise BadNameError(f"is {len(raw)} bytes long; the limit is {MAX_NAME_BYTES}")
    path: Path
    if raw[0] == _SEPARATOR:
        path = _parse_path(raw[1:])
    else:
        try:
            path = (raw.decode("utf-8"),)
        except UnicodeDecodeError as error:
            raise BadNameError(f"is no UTF-8 at byte {error.start}") from None
    for part in path:
        if isinstance(part, str) and any(unicodedata.category(c) in ("Cc", "Cs") for c in part):
            raise BadNameError("holds control characters or halves of surrogate pairs")
    return path


def _parse_path(raw: bytes) -> Path:
    if raw[:1] != b"[" or raw[-1:] != b"]" or b"\n" in raw or b"\r" in raw:
        raise BadNameError("is a path that is no JSON array on one line")
    try:
        found: Any = json.loads(
            raw.decode("ascii"), parse_float=_refuse, parse_constant=_refuse, object_hook=_refuse
        )
    except RecursionError:
        raise BadNameError("is a path nested too deep") from None
    except ValueError as error:
        said = str(error) if isinstance(error, BadNameError) else "is a path that is no JSON"
        raise BadNameError(said) from None
    if not isinstance(found, list) or not found:
        raise BadNameError("is a path without parts")
    if len(found) > MAX_PATH:
        raise BadNameError(f"is a path of {len(found)} parts; the limit is {MAX_PATH}")
    for part in found:
        if isinstance(part, bool) or not isinstance(part, (str, int)):
            raise BadNameError("is a path with a part that is neither a text nor a position")
        if isinstance(part, int) and not 0 <= part < _MAX_POSITION:
            raise BadNameError("is a path with a position that cannot be")
        if part == "":
            raise BadNameError("is a path with an empty part")
    return tuple(found)


def _refuse(_: object) -> NoReturn:
    raise BadNameError("is a path with a part that is neither a text nor a position")


class Names:
    """The names of one file, each once."""

    def __init__(self) -> None:
        self._tree: dict[str | int, Any] = {}
        self._dotted: set[str] = set()

    def add(self, path: Path) -> str:
        """Take a path; its dotted name.

        Raises:
            BadNameError: it is there already, or conflicts with another one.
        """
        branch = self._tree
        for part in path[:-1]:
            _check_kind(branch, part)
            branch = branch.setdefault(part, {})
            if branch is None:
                raise BadNameError("goes through another tensor")
        _check_kind(branch, path[-1])
        if path[-1] in branch:
            folder = branch[path[-1]] is not None
            raise BadNameError("holds other tensors" if folder else "is there twice")
        branch[path[-1]] = None
        dotted = ".".join(map(str, path))
        if dotted in self._dotted:
            raise BadNameError("is another tensor's name when it is written with dots")
        self._dotted.add(dotted)
        return dotted


def _check_kind(branch: dict[str | int, Any], part: str | int) -> None:
    """Keys and positions do not mix at one level."""
    first = next(iter(branch), part)
    if type(first) is not type(part):
        raise BadNameError("mixes keys and positions")
