"""The key-value pairs of a GGUF file, read by a second, simple reader that checks nothing."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"}
_SCALARS |= {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


def read_metadata(path: Path) -> dict[str, Any]:
    """Its metadata, arrays as lists. Tensors are not looked at."""
    with path.open("rb") as file:
        magic, _version, _tensors, pairs = struct.unpack("<4sIQQ", file.read(24))
        assert magic == b"GGUF", path
        return {_string(file): _value(file, _one(file, "I")) for _ in range(pairs)}


def _one(file: BinaryIO, form: str) -> Any:
    (value,) = struct.unpack(f"<{form}", file.read(struct.calcsize(form)))
    return value


def _string(file: BinaryIO) -> str:
    return file.read(_one(file, "Q")).decode()


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(file)
    if kind != _ARRAY:
        return _one(file, _SCALARS[kind])
    kind, length = struct.unpack("<IQ", file.read(12))
    if kind in (_STRING, _ARRAY):
        return [_value(file, kind) for _ in range(length)]
    form = f"<{length}{_SCALARS[kind]}"
    return list(struct.unpack(form, file.read(struct.calcsize(form))))
