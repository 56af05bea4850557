"""Reading a GGUF header (versions 2 and 3): what lies where, every rule of the format checked.

Format, little-endian: ``GGUF``, version, number of tensors, number of keys; the keys with their
values; the tensors' names, dims, types and offsets; padding; the data, each tensor padded to the
alignment. The limits below are part of what loadkit promises; a file beyond them is refused, never
half read. Arrays of numbers become numpy arrays at once, strings of arrays stay bytes until asked
for, so that a vocabulary of 262,144 tokens costs milliseconds.

Source: the GGUF specification of ggml (``docs/gguf.md``), and what llama.cpp's reader accepts.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from loadkit.file_checks import check_content, show
from loadkit_gguf.string_array import StringArray
from loadkit_gguf.tensor_entries import GGUFTensor, read_tensors
from loadkit_gguf.window import MAX_HEADER_BYTES, MAX_STRINGS, Window

if TYPE_CHECKING:
    from loadkit.sources.base import File

__all__ = [
    "MAX_HEADER_BYTES",
    "MAX_KEYS",
    "MAX_KEY_BYTES",
    "MAX_STRINGS",
    "MAX_TENSORS",
    "GGUFHeader",
    "GGUFTensor",
    "StringArray",
    "read_gguf_header",
]

log = logging.getLogger("loadkit")

MAX_KEYS = 100_000
MAX_KEY_BYTES = 65_535
MAX_TENSORS = 250_000  # of one file; experts are one tensor, so models have a few thousand
MAX_ALIGNMENT = 1 << 20
VERSIONS = (2, 3)

_SMALLEST_KEY = 8 + 4 + 1  # bytes: a name's length, a type, a value
_SMALLEST_TENSOR = 8 + 4 + 4 + 8  # a name's length, a count of dims, a type, an offset

_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS: dict[int, struct.Struct] = {
    number: struct.Struct(f"<{form}")
    for number, form in zip((0, 1, 2, 3, 4, 5, 6, 10, 11, 12), "BbHhIifQqd", strict=True)
}
_DTYPES: dict[int, np.dtype[Any]] = {
    **{
        number: np.dtype(name)
        for number, name in zip(
            (0, 1, 2, 3, 4, 5, 6, 10, 11, 12),
            ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "<u8", "<i8", "<f8"),
            strict=True,
        )
    },
    _BOOL: np.dtype("u1"),
}
_UINT32 = 4
_KEPT = "_gguf_header"  # of an open file: what was read of it


@dataclass(frozen=True, eq=False)
class GGUFHeader:
    """One file's header.

    Attributes:
        file: the file it was read from.
        version: 2 or 3.
        alignment: every tensor begins at a multiple of it; bytes.
        metadata: every key; values are int, float, bool, str, a numpy array, or a StringArray.
        tensors: in file order; offsets count from the file's first byte.
        data_offset: where the data begins; the header's length with its padding.
    """

    file: File
    version: int
    alignment: int
    metadata: Mapping[str, Any]
    tensors: tuple[GGUFTensor, ...]
    data_offset: int


def read_gguf_header(file: File) -> GGUFHeader:
    """Read and check a GGUF file's header; no byte of the data is read on purpose.

    Takes time linear in the header, and memory of a few times its size. An open file's header is
    read once: a remote one is not fetched again for each of those that look at it.

    Raises:
        FormatError: with the code of the rule that was broken: E_FORMAT (another format's
            content), E_HEADER (magic, version, byte order, length), E_COUNT, E_KEY, E_STRING,
            E_ARRAY, E_TYPE, E_ALIGN, E_NAME, E_DUPLICATE, E_SHAPE, E_DTYPE, E_LAYOUT.
        ReadFailure: the file could not be read.
    """
    kept: GGUFHeader | None = vars(file).get(_KEPT)
    if kept is not None:
        return kept
    check_content(file, "gguf")
    window = Window(file)
    version, tensor_count, key_count = _start(window)
    metadata, kinds = _keys(window, key_count)
    alignment = _alignment(window, metadata, kinds)
    tensors, data_offset = read_tensors(window, tensor_count, alignment)
    found = GGUFHeader(file, version, alignment, metadata, tensors, data_offset)
    vars(file)[_KEPT] = found  # as long as the file
    return found


def _start(window: Window) -> tuple[int, int, int]:
    """Magic, version and both counts."""
    file = window.file
    window.need(24, "E_HEADER", "the start of a GGUF file")
    magic = bytes(window.data[:4])
    if magic != b"GGUF":
        hint = "it is no GGUF file, or its start is damaged; download it again"
        window.fail("E_HEADER", f"it begins with {show(magic)}, not with 'GGUF'", 0, hint=hint)
    window.pos = 4
    version = window.u32("the version")
    if version & 0xFFFF == 0 and version:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        window.fail(
            "E_HEADER",
            f"{show(file.name)} is a big-endian GGUF file (version {swapped}); only little-endian "
            "ones are read",
            4,
            detail={"byte_order": "big", "version": swapped},
            hint="convert it with gguf-py's gguf_convert_endian.py",
        )
    if version not in VERSIONS:
        known = " and ".join(map(str, VERSIONS))
        hint = "convert the model again" if version < 2 else "upgrade loadkit-gguf"
        message = f"it is GGUF version {version}; versions {known} are read"
        window.fail("E_HEADER", message, 4, detail={"version": version}, hint=hint)
    tensors, keys = window.u64("the number of tensors"), window.u64("the number of keys")
    for what, count, least, most, at in (
        ("keys", keys, _SMALLEST_KEY, MAX_KEYS, 16),
        ("tensors", tensors, _SMALLEST_TENSOR, MAX_TENSORS, 8),
    ):
        room = window.left // least
        if count > min(room, most):
            told = f"the limit is {most}" if count > most else f"there is room for {room}"
            detail = {"expected": min(room, most), "actual": count}
            window.fail("E_COUNT", f"it claims {count} {what}; {told}", at, detail=detail)
    return version, tensors, keys


def _keys(window: Window, count: int) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
    """All keys with their values; and for each its type and where it stands."""
    metadata: dict[str, Any] = {}
    kinds: dict[str, tuple[int, int]] = {}
    for _ in range(count):
        at = window.pos
        raw = window.string("a key", MAX_KEY_BYTES, "E_KEY")
        try:
            key = raw.decode("utf-8")
        except UnicodeDecodeError:
            window.fail("E_KEY", f"key {show(raw[:100])} is not UTF-8", at)
        if not key:
            window.fail("E_KEY", "a key is empty", at)
        if key in metadata:
            window.fail("E_KEY", f"key {show(key)} is there twice", at)
        kind = window.u32("a key's type")
        kinds[key] = kind, at
        metadata[key] = _value(window, key, kind)
    return metadata, kinds


def _value(window: Window, key: str, kind: int) -> Any:
    what = f"key {show(key)}"
    if kind in _NUMBERS:
        return window.number(_NUMBERS[kind], what)
    if kind == _BOOL:
        return window.number(_NUMBERS[0], what) != 0
    if kind == _STRING:
        raw = window.string(what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            log.warning("%s: %s is not UTF-8", show(window.file.name), what)
            return raw.decode("utf-8", "replace")
    if kind == _ARRAY:
        return _array(window, what)
    return window.fail("E_TYPE", f"{what} is of type {kind}, which GGUF does not have", window.pos)


def _array(window: Window, what: str) -> Any:
    at = window.pos
    kind = window.u32(what)
    if kind == _ARRAY:
        window.fail("E_TYPE", f"{what} is an array of arrays, which no model needs", at)
    if kind != _STRING and kind not in _DTYPES:
        window.fail("E_TYPE", f"{what} is an array of type {kind}, which GGUF does not have", at)
    count = window.u64(what)
    least = 8 if kind == _STRING else _DTYPES[kind].itemsize
    if count > window.left // least:
        window.fail(
            "E_ARRAY",
            f"{what} claims {count} elements; there is room for {window.left // least}",
            at + 4,
            detail={"expected": window.left // least, "actual": count},
        )
    if kind == _STRING:
        return StringArray(what, window.file, *window.strings(count, what))
    values = np.frombuffer(window.block(count * least, what), _DTYPES[kind])
    return values != 0 if kind == _BOOL else values


def _alignment(
    window: Window, metadata: Mapping[str, Any], kinds: Mapping[str, tuple[int, int]]
) -> int:
    """``general.alignment``, 32 where it is not given."""
    key = "general.alignment"
    if key not in metadata:
        return 32
    kind, at = kinds[key]
    value = metadata[key]
    if kind != _UINT32 or not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):
        shown = show(value) if isinstance(value, str) else value
        message = f"{key} is {shown}; it must be an unsigned 32-bit power of two from 8 to 2^20"
        window.fail("E_ALIGN", message, at)
    return int(value)
