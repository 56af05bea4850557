"""Safetensors files that lie, one builder per row: ``ROWS[id] = (codes, header, payload, n)``.

``codes`` are the error codes that are right; an empty tuple means that the file must load.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from helpers.checkpoints import LFS_POINTER

__all__ = ["ROWS", "Row", "entry", "observe", "write_row"]


class Row(NamedTuple):
    codes: tuple[str, ...]
    data: Callable[[], bytes]  # the whole file


def entry(dtype: Any, shape: Any, offsets: Any, **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def _file(header: bytes | dict[str, Any], payload: bytes = b"", n: int | None = None) -> bytes:
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(body) if n is None else n) + body + payload


def _row(
    codes: str, header: bytes | dict[str, Any], payload: bytes = b"", n: int | None = None
) -> Row:
    return Row(tuple(codes.split()), lambda: _file(header, payload, n))


def _shape(codes: str, shape: Any, offsets: Any = (0, 4)) -> Row:
    return _row(codes, {"w": entry("F32", shape, list(offsets))}, b"\0" * 4)


def _name(codes: str, name: str) -> Row:
    return _row(codes, {name: entry("F32", [1], [0, 4])}, b"\0" * 4)


def _twice(first: str, second: str, payload: bytes = b"") -> bytes:
    return _file(f"{{{first},{second}}}".encode(), payload)


_W = '"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
_DEEP = 100_000

ROWS: dict[str, Row] = {
    "S01": Row(("E_HEADER",), lambda: b""),
    "S02-three-bytes": Row(("E_HEADER",), lambda: b"\x10\0\0"),
    "S02-n-is-0": Row(("E_HEADER",), lambda: b"\0" * 64),
    "S03": _row("E_HEADER", b"{}", n=2**64 - 1),
    "S04": _row("E_HEADER", b"{}", n=100_000_001),
    "S05": _row("E_HEADER", b"{}", n=1000),
    "S06-cut-in-the-middle": _row("E_JSON", b'{"w":{"dtype":"F32","sha'),
    "S07": _row("E_UTF8", b'{"\xff\xfe":1}'),
    "S08": _row("E_JSON", b"[1,2]"),
    "S09": _row("E_JSON", b"null"),
    "S10-text-after": _row("E_JSON", b"{} {}"),
    "S11": _row("E_JSON", b"\xef\xbb\xbf{}"),
    "S12": _row(
        "E_LAYOUT", {"a": entry("F32", [4], [0, 16]), "b": entry("F32", [4], [0, 16])}, b"\0" * 16
    ),
    "S13": _row(
        "E_LAYOUT", {"a": entry("F32", [1], [0, 4]), "b": entry("F32", [1], [8, 12])}, b"\0" * 12
    ),
    "S14-trailing": _row("E_LAYOUT", {"w": entry("F32", [4], [0, 16])}, b"\0" * 18),
    "S15": _row("E_LAYOUT", {"w": entry("F32", [4], [0, 16])}, b"\0" * 14),
    "S16": Row(("E_DUPLICATE",), lambda: _twice(_W, _W.replace("F32", "I32"), b"\0" * 4)),
    "S17": Row(
        ("E_DUPLICATE",),
        lambda: _twice('"__metadata__":{"a":"1"}', '"__metadata__":{"b":"2"}'),
    ),
    "S18-field-missing": _row("E_FIELD", {"w": {"dtype": "F32", "shape": [1]}}, b"\0" * 4),
    "S18-field-twice": _row(
        "E_DUPLICATE",
        b'{"w":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        b"\0" * 4,
    ),
    "S19": _row("E_FIELD", {"w": entry("F32", [1], [0, 4], evil=1)}, b"\0" * 4),
    "S20": _shape("E_SHAPE", [2, 2**64 - 2]),
    "S21": _shape("E_SHAPE", [2**32, 2**32]),
    "S22-minus": _shape("E_SHAPE", [-1]),
    "S22-string": _shape("E_SHAPE", ["1"]),
    "S22-no-list": _shape("E_SHAPE", 1),
    "S22-lists": _shape("E_SHAPE", [[1]]),
    "S23": _shape("E_SHAPE", [1.0]),
    "S24": _shape("E_SHAPE", [True]),
    "S25": _shape("E_SHAPE", [float("nan")]),
    "S26-zero-first": _row(
        "E_JSON", b'{"w":{"dtype":"F32","shape":[01],"data_offsets":[0,4]}}', b"\0" * 4
    ),
    "S27": _shape("E_SHAPE", [0, 2**63], (0, 0)),
    "S28": _shape("E_SHAPE", [0, 2**63 - 1], (0, 0)),
    "S29": _shape("E_SHAPE", [1] * 1_000_000),
    "S30-nine-dims": _shape("E_SHAPE", [1] * 9),
    "S30-eight-dims": _shape("", [1] * 8),
    "S31": _shape("E_LAYOUT", [1], (4, 0)),
    "S32": _shape("E_LAYOUT", [1], (2**64 - 4, 2**64)),
    "S33": _shape("E_LAYOUT", [1], (0, 4, 8)),
    "S34-one-offset": _shape("E_LAYOUT", [1], (0,)),
    "S34-minus": _shape("E_LAYOUT", [1], (-4, 0)),
    "S35": _row("E_DTYPE E_LAYOUT", {"w": entry("F128", [1], [0, 16])}, b"\0" * 16),
    "S36": _row("E_DTYPE E_LAYOUT", {"w": entry(7, [1], [0, 4])}, b"\0" * 4),
    "S37": _row("E_DTYPE E_LAYOUT", {"w": entry("F4", [3], [0, 2])}, b"\0" * 2),
    "S38-too-few-bytes": _row("E_LAYOUT", {"w": entry("F32", [16, 32], [0, 512])}, b"\0" * 512),
    "S39": _row(
        "",
        {"a": entry("U8", [1], [0, 1]), "b": entry("F64", [1], [1, 9])},
        b"\x07" + struct.pack("<d", 1.5),
    ),
    "S40": _row("E_METADATA", {"__metadata__": {"k": 1}}),
    "S41": _row("E_METADATA", {"__metadata__": ["k"]}),
    "S42-deep-list": _row("E_JSON", b'{"w":' + b"[" * _DEEP + b"]" * _DEEP + b"}"),
    "S42-deep-object": _row("E_JSON", b'{"w":' + b'{"a":' * _DEEP + b"1" + b"}" * _DEEP + b"}"),
    "S43": _row("E_JSON", b'{"__metadata__":{"k":' + b"[" * _DEEP + b"]" * _DEEP + b"}}"),
    "S43-not-closed": _row("E_JSON", b'{"__metadata__":{"k":[' + b" " * 100_000),
    "S44": _name("E_NAME", "\x1b]0;pwn\x07\x1b[2J"),
    "S45": _name("", "<script>alert(1)</script>"),
    "S46-bidi": _name("", "w\u202egnp.weight"),
    "S47": _name("E_NAME", "w\0eight"),
    "S48": _name("E_NAME", "w\nINFO all is well"),
    "S49-up": _name("", "../../../../abs/x"),
    "S49-absolute": _name("", "/abs"),
    "S49-drive": _name("", "C:\\x"),
    "S49-device": _name("", "CON"),
    "S49-long": _name("E_NAME", "a" * 5000),
    "S50-at-the-limit": _name("", "a" * 1024),
    "S50-bytes-not-letters": _name("E_NAME", "\u00e9" * 1000),
    "S50-empty": _name("E_NAME", ""),
    "S51": _name("E_NAME", "a" * 1_000_000),
    "S52": _row(
        "E_JSON", b'{"\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"\0" * 4
    ),
    "S52-whole-pair": _row(
        "", b'{"\\ud83d\\ude00":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"\0" * 4
    ),
    "S53": _row(
        "",
        {"caf\u00e9": entry("F32", [1], [0, 4]), "cafe\u0301": entry("F32", [1], [4, 8])},
        b"\0" * 8,
    ),
    "S55": _row(
        "",
        {
            "a": entry("F32", [1], [0, 4]),
            "none": entry("F32", [0, 3], [4, 4]),
            "b": entry("F32", [1], [4, 8]),
            "nor": entry("F32", [0], [8, 8]),
        },
        b"\0" * 8,
    ),
    "S55-in-the-middle": _row(
        "E_LAYOUT", {"a": entry("F32", [2], [0, 8]), "z": entry("F32", [0], [4, 4])}, b"\0" * 8
    ),
    "S56": _row("", {"__metadata__": {"format": "pt"}}),
    "S57": _row("", b"{}"),
    "S58-space-first": _row("E_JSON", b" {}"),
    "S58-spaces-after": _row("", b"{}" + b" " * 100_000),
    "S59": _row(
        "E_JSON",
        b'{"w":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}',
        b"\0" * 4,
    ),
    "S59-offset": _row(
        "E_JSON",
        b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,' + b"9" * 5000 + b"]}}",
        b"\0" * 4,
    ),
    "S60-zip": Row(("E_FORMAT",), lambda: b"PK\x03\x04\0\0\x08\x08" + b"\0" * 100),
    "S60-pickle": Row(("E_FORMAT",), lambda: b"\x80\x02}q\0." + b"\0" * 100),
    "S60-gguf": Row(("E_FORMAT",), lambda: b"GGUF\x03\0\0\0" + b"\0" * 100),
    "ST-01-pointer": Row(("E_FORMAT",), lambda: LFS_POINTER.encode()),
    "ST-01-page": Row(("E_FORMAT",), lambda: b"<!DOCTYPE html><html>401</html>"),
    "ST-01-text": Row(("E_FORMAT",), lambda: b"Invalid username or password."),
    "entry-no-object": _row("E_FIELD", {"w": 1}),
    "comma-at-the-end": _row("E_JSON", f"{{{_W},}}".encode(), b"\0" * 4),
    "control-character": _row("E_JSON", f"{{{_W}}}".replace("w", "\x01").encode(), b"\0" * 4),
    "many-metadata-keys": _row(
        "E_METADATA", {"__metadata__": {str(key): "" for key in range(10_001)}}
    ),
    "million-brackets": _row("E_FIELD", b'{"w":[' + b"[]," * 1_000_000 + b"[]]}"),
}


def write_row(row: str, path: Path) -> Path:
    """Write a row's file."""
    path.write_bytes(ROWS[row].data())
    return path


def observe(path: Path) -> str:
    """What reading the file's header comes to: "ok" or the code of its typed error."""
    from loadkit.config import LoadConfig
    from loadkit.errors import LoadkitError
    from loadkit.safetensors_format import read_header
    from loadkit.sources.local import LocalSource

    with LocalSource(path, LoadConfig()) as source:
        try:
            read_header(source.open(path.name))
        except LoadkitError as error:
            return error.code
    return "ok"
