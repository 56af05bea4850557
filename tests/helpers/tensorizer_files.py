"""Tensorizer files: written by the library, and spoiled byte by byte."""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

__all__ = ["GOOD", "ROWS", "Container", "Row", "plain_file", "write_tensors"]

HEAD = 73  # bytes before the index


def write_tensors(path: Path, tensors: Mapping[str, object], key: bytes | None = None) -> Path:
    """The library's own file."""
    from tensorizer import EncryptionParams, TensorSerializer

    path.parent.mkdir(parents=True, exist_ok=True)
    writer = TensorSerializer(path, encryption=None if key is None else EncryptionParams(key))
    writer.write_state_dict(dict(tensors))
    writer.close()
    return path


def good() -> dict[str, torch.Tensor]:
    """Two tensors, seeded; the first long enough to be cut in the middle."""
    generator = torch.Generator().manual_seed(7)
    return {
        "first": torch.randn(64, 32, generator=generator),
        "second": torch.randn(16, generator=generator),
    }


GOOD = good()


class Container:
    """The bytes of a file, and where its fields are."""

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)

    def put(self, at: int, form: str, value: object) -> None:
        """Overwrite one number, or bytes."""
        struct.pack_into(form, self.data, at, value)

    def get(self, at: int, form: str) -> int:
        """One number."""
        return struct.unpack_from(form, self.data, at)[0]

    def entry(self, name: str) -> int:
        """Where a name is in the index."""
        return self.data.index(name.encode(), HEAD)

    def dtype_at(self, name: str) -> int:
        """Where its dtype's length is in the index."""
        return self.entry(name) + len(name) + 1

    def location(self, name: str) -> int:
        """Where its header's offset is in the index; the data's offset and length follow."""
        at = self.dtype_at(name)
        at += 1 + self.data[at]
        return at + 1 + 4 * self.data[at]

    def header(self, name: str) -> int:
        """Where its own header begins."""
        return self.get(self.location(name), "<Q")

    def start(self, name: str) -> int:
        """Where its data begins."""
        return self.get(self.location(name) + 8, "<Q")

    def hashes(self, name: str) -> int:
        """Where the number of its hashes is."""
        at = self.header(name) + 11
        at += 2 + self.get(at, "<H")
        at += 1 + self.data[at]
        return at + 1 + 4 * self.data[at] + 2

    def rehash(self, name: str) -> None:
        """Make its hashes right again, of whatever types they are."""
        begin, start = self.header(name), self.start(name)
        at = self.hashes(name)
        values, at = [], at + 1
        for _ in range(self.data[at - 1]):
            kind, size = self.data[at], self.data[at + 1]
            values.append((kind, at + 2, size))
            self.data[at + 2 : at + 2 + size] = bytes(size)
            at += 2 + size
        nbytes = self.get(self.location(name) + 16, "<Q")
        hashed = bytes(self.data[begin : start + nbytes])
        for kind, where, size in values:
            if kind == 0:
                self.put(where, "<I", zlib.crc32(hashed))
            elif kind == 1:
                self.data[where : where + size] = hashlib.sha256(hashed).digest()


def plain_file(folder: Path, tensors: Mapping[str, object] = GOOD) -> Container:
    """What the library writes, in memory."""
    return Container(write_tensors(folder / "made.tensors", tensors).read_bytes())


class Row(NamedTuple):
    """One bad input: what spoils the file, and the code of the error."""

    name: str
    spoil: Callable[[Container], object]
    code: str


def _cut(to: Callable[[Container], int]) -> Callable[[Container], object]:
    def spoil(file: Container) -> None:
        del file.data[to(file) :]

    return spoil


def _number(where: Callable[[Container], int], form: str, value: object) -> Callable[..., object]:
    return lambda file: file.put(where(file), form, value)


def _location(name: str, field: int, value: int) -> Callable[[Container], object]:
    return lambda file: file.put(file.location(name) + 8 * field, "<Q", value)


def _no_hash(file: Container) -> None:
    file.data[file.hashes("first")] = 0


def _both_lengths(name: str, value: int) -> Callable[[Container], object]:
    """In the index and in the tensor's own header."""

    def spoil(file: Container) -> None:
        end = file.start(name) - 8
        file.put(file.location(name) + 16, "<Q", value % 2**64)
        file.put(end, "<Q", value % 2**64)

    return spoil


def _drop(file: Container) -> None:
    """One tensor less in the index, where nothing is left of it."""
    at = file.entry("second") - 2
    end = file.location("second") + 24
    file.data[at:end] = bytes(end - at)
    file.put(HEAD - 16, "<Q", 1)


def _rename(file: Container) -> None:
    at = file.entry("first")
    file.data[at : at + 5] = b"thing"


def _rename_negative(file: Container) -> None:
    _both_lengths("first", -8)(file)
    _rename(file)


def _flip(file: Container) -> None:
    file.data[file.start("first") + 100] ^= 4


def _dtype(value: bytes) -> Callable[[Container], object]:
    def spoil(file: Container) -> None:
        for at in (file.dtype_at("first"), file.header("first") + 11 + 2 + 5):
            file.data[at + 1 : at + 4] = value[:3]

    return spoil


def _long_dtype(file: Container) -> None:
    """As long as its length can be said in one byte: what comes after it is a part of it."""
    for at in (file.dtype_at("first"), file.header("first") + 11 + 2 + 5):
        file.data[at] = 255


def _count(value: int) -> Callable[[Container], object]:
    return _number(lambda _: HEAD - 16, "<Q", value)


def _header_length(value: int) -> Callable[[Container], object]:
    return _number(lambda file: file.header("first"), "<Q", value)


ROWS = [
    Row("T01", _cut(lambda _: 0), "E_HEADER"),
    Row("T03-5", _cut(lambda _: 5), "E_HEADER"),
    Row("T03-20", _cut(lambda _: 20), "E_HEADER"),
    Row("T04", _number(lambda _: 9, "32s", b"\xff" * 32), "E_HEADER"),
    Row("T05", _cut(lambda file: len(file.data) - 16), "E_TRUNCATED"),
    Row("T07", _cut(lambda file: file.start("first") + 1000), "E_TRUNCATED"),
    Row("T08", _flip, "E_HASH"),
    Row("T09", _no_hash, "E_HASH"),
    *(Row(f"T13-{v}", _header_length(v), "E_HEADER") for v in (0, 4, 16 << 30, 2**63)),
    *(Row(f"T15-{v}", _count(v), "E_COUNT") for v in (0, 1, 3, 2**63)),
    Row("T15-dropped", _drop, "E_COUNT"),
    *(Row(f"T16-{v}", _location("first", 2, v % 2**64), "E_LAYOUT") for v in (-1, 0, 1 << 30)),
    *(Row(f"T16-both-{v}", _both_lengths("second", v), "E_LAYOUT") for v in (-8, 0, 2**62)),
    Row("T17", _number(lambda _: HEAD - 8, "<Q", 1 << 40), "E_LAYOUT"),
    Row("T19", _rename, "E_LAYOUT"),
    Row("T20", _rename_negative, "E_LAYOUT"),
    *(
        Row(f"T23-{value.decode()}", _dtype(value), "E_DTYPE")
        for value in (b"|O8", b"<V4", b"<U9", b"<M8", b"abc")
    ),
    Row("T23-longest", _long_dtype, "E_DTYPE"),
    Row("T25-eof", _location("second", 0, 1 << 20), "E_LAYOUT"),
    Row("T25-max", _location("second", 0, 2**64 - 1), "E_LAYOUT"),
]  # fmt: skip
