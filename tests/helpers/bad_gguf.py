"""GGUF files that lie, one builder per row: ``ROWS[id] = (codes, bytes)``.

``codes`` are the error codes that are right; an empty tuple means that the header must be read.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from helpers.gguf_files import ARCH, Tensor, array, f32, gguf_bytes, string

__all__ = ["ROWS", "Row", "observe", "write_row"]


class Row(NamedTuple):
    codes: tuple[str, ...]
    data: Callable[[], bytes]


def _raw(codes: str, data: Callable[[], bytes]) -> Row:
    return Row(tuple(codes.split()), data)


def _row(codes: str, *args: Any, **kwargs: Any) -> Row:
    return Row(tuple(codes.split()), lambda: gguf_bytes(*args, **kwargs))


def _key(codes: str, name: str | bytes, value: Any) -> Row:
    return _row(codes, [f32("w", 8)], [ARCH, (name, value)])


def _dims(*dims: int, claimed: int | None = None) -> Row:
    return _row("E_SHAPE", [Tensor("w", dims, 0, b"\0" * 32, claimed_dims=claimed)], [ARCH])


def _offset(offset: int) -> Row:
    return _row("E_LAYOUT", [Tensor("w", [8], 0, b"\0" * 32, offset)], [ARCH])


def _type(codes: str, kind: int, *dims: int) -> Row:
    return _row(codes, [Tensor("w", dims, kind, b"\0" * 64)], [ARCH])


def _name(codes: str, name: str | bytes) -> Row:
    return _row(codes, [Tensor(name, [8], 0, b"\0" * 32)], [ARCH])


def _start(version: int = 3, tensors: int = 0, keys: int = 0, order: str = "<") -> bytes:
    return b"GGUF" + struct.pack(f"{order}IQQ", version, tensors, keys)


def _one_key(data: bytes) -> bytes:
    """A file that ends in its only key."""
    return _start(keys=1) + data


def _array_at_end(kind: int, count: int) -> bytes:
    return _one_key(string("a") + struct.pack("<IIQ", 9, kind, count))


def _nested() -> tuple[int, bytes]:
    data = struct.pack("<IQ", 0, 2) + b"\0\0"
    for _ in range(20):
        data = struct.pack("<IQ", 9, 2) + data * 2 if len(data) < 1 << 16 else data
    return 9, data


_TWO = [f32("a", 8), f32("b", 8)]
_AT = "general.alignment"

ROWS: dict[str, Row] = {
    "G01": _raw("E_HEADER", lambda: b""),
    "G02-magic-only": _raw("E_HEADER", lambda: b"GGUF"),
    "G03": _raw("E_HEADER", lambda: b"GGUF\3\0\0\0"),
    "G04": _raw("E_HEADER", lambda: _start(0) + b"\0" * 32),
    "G05": _raw("E_HEADER", lambda: _start(1) + b"\0" * 32),
    "G06-version-4": _raw("E_HEADER", lambda: _start(4) + b"\0" * 32),
    "G07": _raw("E_HEADER", lambda: _start(3, order=">") + b"\0" * 32),
    "G08": _row("E_COUNT", _TWO, [ARCH], key_count=2**63),
    "G09": _row("E_COUNT", _TWO, [ARCH], key_count=2**62),
    "G10-tensors-2^63": _row("E_COUNT", _TWO, [ARCH], tensor_count=2**63),
    "G11": _raw("E_COUNT", lambda: _start(3, 2**62, 2**62) + b"\0" * 4096),
    "G11-250001-tensors": _raw("E_COUNT", lambda: _start(3, 250_001) + b"\0" * (24 * 250_001)),
    "G12": _raw("E_STRING", lambda: _one_key(string("a", 2**63 - 1) + b"\0" * 64)),
    "G13": _raw("E_STRING", lambda: _one_key(string("a", 2**64 - 1) + b"\0" * 64)),
    "G14-tensor-name-2^62": _raw(
        "E_STRING", lambda: _start(tensors=1) + string("w", 2**62) + b"\0" * 64
    ),
    "G15": _raw(
        "E_STRING",
        lambda: _one_key(string("a") + struct.pack("<I", 8) + string("", 2**62) + b"\0" * 9),
    ),
    "G16": _raw("E_ARRAY", lambda: _array_at_end(0, 2**62)),
    "G17": _raw("E_ARRAY", lambda: _array_at_end(0, 2**63)),
    "G18-strings-2^61": _raw("E_ARRAY", lambda: _array_at_end(8, 2**61)),
    "G18-string-in-array-2^62": _key("E_STRING", "a", array(8, string("x", 2**62) + b"\0" * 64, 2)),
    "G19": _raw("E_ARRAY", lambda: _array_at_end(7, 2**40)),
    "G20": _key("", "a", np.arange(1 << 20, dtype=np.int64).astype("u1")),
    "G21": _key("", "a", np.arange(1 << 22, dtype="<i4")),
    "G22-262144-strings": _key("", "a", [f"token {n}" for n in range(1 << 18)]),
    "G23": _key("E_TYPE", "a", _nested()),
    "G24": _key("E_TYPE", "a", array(99, b"\0" * 64, 2)),
    "G25": _key("E_TYPE", "a", (99, b"\0" * 64)),
    "G26-ends-in-a-number": _raw(
        "E_HEADER", lambda: _one_key(string("aaaaaa") + struct.pack("<I", 10) + b"\0" * 3)
    ),
    "G27": _row("E_KEY", _TWO, [ARCH, ("a", 1), ("a", 1)]),
    "G28": _row("", _TWO, [("GGUF.version", 7), ("GGUF.tensor_count", 9), ARCH]),
    "G29": _key("E_KEY", b"\xff\xfe", 1),
    "G30-empty-key": _key("E_KEY", "", 1),
    "G31": _key("E_KEY", "k" * 65_536, 1),
    "G31-at-the-limit": _key("", "k" * 65_535, 1),
    "G32": _key("E_ALIGN", _AT, 0),
    "G33": _key("E_ALIGN", _AT, 3),
    "G34-2^31": _key("E_ALIGN", _AT, 2**31),
    "G34-64": _row("", _TWO, [ARCH, (_AT, 64)], align=64),
    "G35": _key("E_ALIGN", _AT, (10, struct.pack("<Q", 32))),
    "G36": _key("E_ALIGN", _AT, "32"),
    "G37": _dims(2**32, 2**32),
    "G38-2^62-by-4": _dims(2**62, 4),
    "G39": _dims(2**63),
    "G40": _dims(0, 2**63),
    "G41": _dims(2**64 - 1),
    "G42-four-dims": _row("", [Tensor("w", [2, 2, 2, 1], 0, b"\0" * 32)], [ARCH]),
    "G43": _dims(1, 1, 1, 1, 1),
    "G44": _dims(*[1] * 100),
    "G45": _dims(8, claimed=2**31),
    "G46-data-cut": _row("E_LAYOUT", [f32("w", 8)], [ARCH], cut=16),
    "G47": _offset(1 << 40),
    "G48": _offset(2**64 - 64),
    "G49": _offset(2**63),
    "G50-unaligned": _offset(4),
    "G51": _row("E_LAYOUT", [_TWO[0], _TWO[1]._replace(offset=0)], [ARCH]),
    "G52": _row("E_LAYOUT", _TWO, [ARCH], hole=32),
    "G53": _row("E_LAYOUT", [_TWO[0]._replace(offset=32), _TWO[1]._replace(offset=0)], [ARCH]),
    "G54-same-name": _row("E_DUPLICATE", [_TWO[0], _TWO[0]], [ARCH]),
    "G55": _type("E_DTYPE", 99, 16),
    "G56": _type("E_DTYPE", 4, 32),
    "G57": _type("E_SHAPE", 2, 33),
    "G58-no-tensors": _row("", [], [ARCH]),
    "G59": _row("E_LAYOUT", [f32("w", 8)], [ARCH], tail=b"\0" * 1000),
    "G59-last-not-padded": _row("", [f32("w", 4)], [ARCH], cut=16),
    "G60": _name("", "w" * 65),
    "G60-escape": _name("E_NAME", "\x1b]0;pwn\x07\x1b[2J"),
    "G60-1025-bytes": _name("E_NAME", "w" * 1025),
    "G60-no-utf8": _name("E_NAME", b"\xff\xfe"),
    "G60-empty": _name("E_NAME", ""),
    "G62-all-zeros": _raw("E_HEADER E_FORMAT", lambda: b"\0" * 4096),
    "G63": _row("", [Tensor("w", [32], 2, b"\x00\x7e" + b"\x88" * 16)], [ARCH]),
    "G64-zip": _raw("E_FORMAT", lambda: b"PK\x03\x04" + b"\0" * 64),
    "G64-safetensors": _raw("E_FORMAT", lambda: b"\x20\0\0\0\0\0\0\0{}" + b" " * 30),
    "G64-lfs": _raw(
        "E_FORMAT", lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
    ),
}


def write_row(row: str, path: Path) -> Path:
    path.write_bytes(ROWS[row].data())
    return path


def observe(path: Path) -> str:
    """The code of the error that reading the header gives, or "ok"."""
    from loadkit.config import LoadConfig
    from loadkit.errors import LoadkitError
    from loadkit.sources.local import LocalSource
    from loadkit_gguf.header import read_gguf_header

    with LocalSource(path, LoadConfig()) as source:
        try:
            read_gguf_header(source.open(path.name))
        except LoadkitError as error:
            return error.code
    return "ok"
