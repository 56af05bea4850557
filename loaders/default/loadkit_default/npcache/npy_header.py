"""The header of a ``.npy`` file: bounded, nothing evaluated, nothing unpickled.

Source: numpy's format description, ``numpy/lib/format.py`` (versions 1.0 to 3.0).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from loadkit.errors import FormatError
from loadkit.file_checks import show

if TYPE_CHECKING:
    from loadkit.sources.base import File

__all__ = ["MAX_NPY_HEADER", "NpyHeader", "npy_header", "read_npy_header"]

MAX_NPY_HEADER = 65_535  # bytes: what version 1.0 can say
_MAX_DIMS = 8
_MAX_DIM = 2**48
_ALIGN = 64
_MAGIC = b"\x93NUMPY"
# Byte order, kind, size: plain numbers. Objects, records, texts and dates are no weights.
_DESCR = re.compile(r"(?P<order>[<>|=]?)(?P<kind>[biufc])(?P<size>1|2|4|8|16)")
_DICT = re.compile(
    r"\{'descr': '(?P<descr>[^'\\]{1,16})', 'fortran_order': (?P<fortran>True|False), "
    r"'shape': \((?P<shape>[0-9, ]{0,200})\), ?\}[ ]*\n"
)


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """What a ``.npy`` file holds.

    Attributes:
        descr: numpy's dtype: byte order, kind, bytes of an element.
        fortran_order: whether the first index runs fastest.
        shape: in elements.
        start: the data's first byte.
    """

    descr: str
    fortran_order: bool
    shape: tuple[int, ...]
    start: int


def read_npy_header(file: File) -> NpyHeader:
    """Read and check a header against the file; nothing is allocated for the data.

    Raises:
        FormatError: E_NPY: no ``.npy`` file, a header that is too long or spells anything but a
            plain array of numbers, or one that does not describe the file's very bytes.
        ReadFailure: the file could not be read.
    """
    head = file.read(0, min(file.size, 12))
    version, start = (head[6:7], 10) if head[6:7] == b"\x01" else (head[6:7], 12)
    if head[:6] != _MAGIC or version not in (b"\x01", b"\x02", b"\x03") or len(head) < start:
        _wrong(file, "is no .npy file of version 1.0 to 3.0", 0)
    length = int.from_bytes(head[8:start], "little")
    if length > MAX_NPY_HEADER or start + length > file.size:
        _wrong(file, f"claims a header of {length} bytes; the limit is {MAX_NPY_HEADER}", 8)
    text = file.read(start, length).decode("latin-1")
    found = _DICT.fullmatch(text)
    if found is None:
        _wrong(file, f"has a header that describes no plain array: {show(text[:80])}", start)
    descr = _DESCR.fullmatch(found["descr"])
    if descr is None:
        _wrong(file, f"holds {show(found['descr'])}, which is no plain number", start)
    shape = _shape(file, found["shape"], start)
    nbytes = math.prod(shape) * int(descr["size"])
    there = file.size - start - length
    if nbytes != there:
        _wrong(
            file,
            f"is said to be {found['descr']} {list(shape)}, {nbytes} bytes, and has {there} after "
            "its header",
            start,
        )
    return NpyHeader(found["descr"], found["fortran"] == "True", shape, start + length)


def _shape(file: File, text: str, at: int) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if parts[-1] == "":
        parts.pop()
    elif len(parts) == 1:
        parts = ["?"]  # (3) is a number, (3,) a shape
    if len(parts) > _MAX_DIMS or not all(part.isdigit() and len(part) <= 15 for part in parts):
        _wrong(file, f"has the shape ({text[:60]})", at)
    shape = tuple(map(int, parts))
    if any(dim > _MAX_DIM for dim in shape):
        _wrong(file, f"has the shape {list(shape)}; the limit of a dim is {_MAX_DIM}", at)
    return shape


def npy_header(nbytes: int) -> bytes:
    """The header of a file of ``nbytes`` bytes, itself a multiple of 64 bytes long."""
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({nbytes},), }}"
    length = len(text) + 1
    length += -(10 + length) % _ALIGN
    return _MAGIC + b"\x01\x00" + length.to_bytes(2, "little") + f"{text:<{length - 1}}\n".encode()


def _wrong(file: File, problem: str, offset: int) -> NoReturn:
    raise FormatError(
        f"{show(file.name)} {problem}",
        code="E_NPY",
        file=file.name,
        offset=offset,
        hint="remove the cache; the next load makes it again",
    )
