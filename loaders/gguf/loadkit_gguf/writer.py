"""Writing GGUF files: keys, the tensors' entries, their data padded to the alignment.

Source: the GGUF specification of ggml (``docs/gguf.md``), version 3.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from loadkit.errors import ModelError
from loadkit.file_checks import show
from loadkit_gguf.ggml_types import GGMLType

__all__ = ["ALIGNMENT", "StoredTensor", "header_bytes", "write_file"]

ALIGNMENT = 32
VERSION = 3
_UINT32, _FLOAT32, _BOOL, _STRING, _ARRAY, _INT64 = 4, 6, 7, 8, 9, 11
_ARRAYS = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "b1": 7, "u8": 10,
           "i8": 11, "f8": 12}  # fmt: skip


class Sink(Protocol):
    """Where a file's bytes go."""

    def write(self, data: memoryview | bytes, tensor: str | None = None) -> None:
        """Take all of ``data``."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor to write: ``shape`` as torch counts, ``blocks()`` its bytes in order."""

    name: str
    kind: GGMLType
    shape: tuple[int, ...]
    blocks: Callable[[], Iterator[memoryview | bytes]]

    @property
    def nbytes(self) -> int:
        """Its bytes, without padding."""
        return int(np.prod(self.shape, dtype=np.int64)) // self.kind.block * self.kind.block_bytes


def write_file(out: Sink, keys: Mapping[str, Any], tensors: Sequence[StoredTensor]) -> int:
    """Write one file; returns the bytes of its tensors.

    Raises:
        ModelError: E_LAYOUT, a tensor gave other bytes than its shape says.
        ValueError: a key's value has no type.
        OSError: whatever ``out`` raises.
    """
    out.write(header_bytes(keys, tensors))
    total = 0
    for tensor in tensors:
        written = 0
        for block in tensor.blocks():
            written += len(block)
            out.write(block, tensor.name)
        if written != tensor.nbytes:
            raise ModelError(
                f"tensor {show(tensor.name)} gave {written} bytes, not {tensor.nbytes}",
                code="E_LAYOUT",
                tensor=tensor.name,
            )
        out.write(bytes(-written % ALIGNMENT))
        total += written
    return total


def header_bytes(keys: Mapping[str, Any], tensors: Sequence[StoredTensor]) -> bytes:
    """Everything before the data, padded."""
    out = bytearray(b"GGUF" + struct.pack("<IQQ", VERSION, len(tensors), len(keys)))
    for name, value in keys.items():
        out += _string(name) + _typed(value)
    offset = 0
    for tensor in tensors:
        dims = tensor.shape[::-1]
        out += _string(tensor.name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        out += struct.pack("<IQ", tensor.kind.number, offset)
        offset += tensor.nbytes + -tensor.nbytes % ALIGNMENT
    return bytes(out) + bytes(-len(out) % ALIGNMENT)


def _string(text: str | bytes) -> bytes:
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def _typed(value: Any) -> bytes:
    """A key's value after its type."""
    if isinstance(value, bool):
        return struct.pack("<IB", _BOOL, value)
    if isinstance(value, int):
        if 0 <= value < 1 << 32:
            return struct.pack("<II", _UINT32, value)
        return struct.pack("<Iq", _INT64, value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    if isinstance(value, np.generic):  # of the width that a key is known with
        return struct.pack("<I", _ARRAYS[value.dtype.str.lstrip("<>|=")]) + value.tobytes()
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, np.ndarray):
        kind = _ARRAYS.get(value.dtype.str.lstrip("<>|="))
        if kind is None or value.ndim != 1:
            raise ValueError(f"no GGUF array holds {value.dtype} {list(value.shape)}")
        data = value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()
        return struct.pack("<IIQ", _ARRAY, kind, len(value)) + data
    raw = getattr(value, "raw", None)  # a StringArray: bytes as they were
    items = [raw(i) for i in range(len(value))] if callable(raw) else list(value)
    if not all(isinstance(item, str | bytes) for item in items):
        raise ValueError(f"no GGUF value holds {type(value).__name__}")
    return struct.pack("<IIQ", _ARRAY, _STRING, len(items)) + b"".join(map(_string, items))
