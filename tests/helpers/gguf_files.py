"""GGUF files made by hand, so that a header can say anything.

``gguf_bytes(tensors, keys)`` is a right file unless told otherwise. A key's value is a pair (type,
bytes), or a Python value whose type is guessed (int: uint32).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = [
    "ARCH",
    "LLAMA_KEYS",
    "Tensor",
    "array",
    "f32",
    "gguf_bytes",
    "llama_tensors",
    "lone_llama",
    "string",
    "write_gguf",
]

UINT32, FLOAT32, BOOL, STRING, ARRAY = 4, 6, 7, 8, 9
Key = tuple[str | bytes, Any]


class Tensor(NamedTuple):
    """``dims`` in the file's order; ``offset`` None is where it belongs."""

    name: str | bytes
    dims: Sequence[int]
    kind: int
    data: bytes
    offset: int | None = None
    claimed_dims: int | None = None


def string(text: str | bytes, size: int | None = None) -> bytes:
    """A string; ``size`` is the length it claims."""
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw) if size is None else size) + raw


def array(kind: int, data: bytes, count: int) -> tuple[int, bytes]:
    """A key's value: an array that claims ``count`` elements."""
    return ARRAY, struct.pack("<IQ", kind, count) + data


def f32(name: str, *shape: int, values: Any = None) -> Tensor:
    """A float32 tensor of torch shape ``shape``: ``values``, or 0, 1, 2, ..."""
    if values is None:
        values = torch.arange(int(np.prod(shape)), dtype=torch.float32)
    data = torch.as_tensor(values, dtype=torch.float32).contiguous().numpy().tobytes()
    return Tensor(name, shape[::-1], 0, data)


def _value(value: Any) -> bytes:
    if isinstance(value, tuple):
        kind, data = value
        return struct.pack("<I", kind) + data
    if isinstance(value, bool):
        return struct.pack("<IB", BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", FLOAT32, value)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + string(value)
    if isinstance(value, np.ndarray):
        kind = {"u1": 0, "i4": 5, "u4": 4, "f4": 6, "b1": 7}[value.dtype.str[1:]]
        return _value(array(kind, value.tobytes(), len(value)))
    return _value(array(STRING, b"".join(map(string, value)), len(value)))


def gguf_bytes(
    tensors: Iterable[Tensor] = (),
    keys: Iterable[Key] = (),
    *,
    version: int = 3,
    align: int = 32,
    tensor_count: int | None = None,
    key_count: int | None = None,
    tail: bytes = b"",
    cut: int = 0,
    hole: int = 0,
) -> bytes:
    """A file. ``hole`` bytes go before the second tensor, ``tail`` after all, ``cut`` are lost."""
    tensors, keys = list(tensors), list(keys)
    out = bytearray(b"GGUF" + struct.pack("<I", version))
    out += struct.pack("<Q", len(tensors) if tensor_count is None else tensor_count)
    out += struct.pack("<Q", len(keys) if key_count is None else key_count)
    for name, value in keys:
        out += string(name) + _value(value)
    data = bytearray()
    for index, tensor in enumerate(tensors):
        data += b"\0" * (hole if index == 1 else 0)
        offset = len(data) if tensor.offset is None else tensor.offset
        dims = len(tensor.dims) if tensor.claimed_dims is None else tensor.claimed_dims
        out += string(tensor.name) + struct.pack("<I", dims)
        out += b"".join(struct.pack("<Q", dim) for dim in tensor.dims)
        out += struct.pack("<IQ", tensor.kind, offset)
        data += tensor.data + b"\0" * (-len(tensor.data) % align)
    out += b"\0" * (-len(out) % align) + data + tail
    return bytes(out[: len(out) - cut])


def write_gguf(path: Path, *args: Any, **kwargs: Any) -> Path:
    """``gguf_bytes`` in a file."""
    path.write_bytes(gguf_bytes(*args, **kwargs))
    return path


ARCH: Key = ("general.architecture", "llama")
LLAMA_KEYS: list[Key] = [
    ARCH,
    ("llama.block_count", 2),
    ("llama.embedding_length", 16),
    ("llama.attention.head_count", 4),
    ("llama.attention.head_count_kv", 2),
    ("llama.feed_forward_length", 32),
]


def llama_tensors(
    *, layers: int = 2, hidden: int = 16, heads: int = 4, kv: int = 2, ffn: int = 32,
    vocab: int = 40, head: bool = False, seed: int = 0,
) -> list[Tensor]:  # fmt: skip
    """A toy Llama in GGUF's names and float32, q and k in GGUF's order of rows as they come."""
    generator = torch.Generator().manual_seed(seed)

    def made(name: str, *shape: int) -> Tensor:
        return f32(name, *shape, values=torch.randn(shape, generator=generator))

    size = hidden // heads
    found = [made("token_embd.weight", vocab, hidden), made("output_norm.weight", hidden)]
    for i in range(layers):
        found += [
            made(f"blk.{i}.attn_norm.weight", hidden),
            made(f"blk.{i}.attn_q.weight", heads * size, hidden),
            made(f"blk.{i}.attn_k.weight", kv * size, hidden),
            made(f"blk.{i}.attn_v.weight", kv * size, hidden),
            made(f"blk.{i}.attn_output.weight", hidden, heads * size),
            made(f"blk.{i}.ffn_norm.weight", hidden),
            made(f"blk.{i}.ffn_gate.weight", ffn, hidden),
            made(f"blk.{i}.ffn_up.weight", ffn, hidden),
            made(f"blk.{i}.ffn_down.weight", hidden, ffn),
        ]
    return [*found, made("output.weight", vocab, hidden)] if head else found


def lone_llama(path: Path, **options: Any) -> Path:
    """A toy Llama with nothing beside it and no optional key."""
    return write_gguf(path, llama_tensors(**options), LLAMA_KEYS)
