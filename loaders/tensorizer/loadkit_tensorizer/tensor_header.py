"""The header that each tensor has before its data, and the hashes in it.

| bytes | what |
|---|---|
| 8 | bytes of this header |
| 2, 1 | number of the module, kind |
| 2 + n | name |
| 1 + n | dtype |
| 1 + 4n (or 8n) | shape |
| 2 + n | hashes: how many, then type, length and value of each |
| 8 + n | of an encrypted file: how the data is encrypted |
| 8 | bytes of the data |

It has to say what the index says. A hash is of the header, its hash values zeroed and what is said
of encryption left out, and then the data.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadkit.errors import FormatError, IntegrityError
from loadkit.file_checks import show
from loadkit_tensorizer.entries import Entry, Index
from loadkit_tensorizer.layout import AGAIN, wrong

if TYPE_CHECKING:
    from loadkit.integrity.digests import Hash

__all__ = ["TensorHeader", "header_length", "parse_tensor_header", "read_tensor_headers"]

_CRC32, _SHA256 = 0, 1
_SIZES = {_CRC32: 4, _SHA256: 32}  # bytes of a value


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor's hashes.

    Attributes:
        entry: what the index says.
        hashes: type -> value, of the known types.
        others: types that are not known.
        hashed: the bytes of the header that go before the data.
        encrypted: whether the data is.
    """

    entry: Entry
    hashes: dict[int, bytes]
    others: tuple[int, ...]
    hashed: bytes
    encrypted: bool

    @property
    def digest(self) -> str | None:
        """The strongest hash in hex; None: there is none that can be computed."""
        if _SHA256 in self.hashes:
            return self.hashes[_SHA256].hex()
        if _CRC32 in self.hashes:
            return f"{int.from_bytes(self.hashes[_CRC32], 'little'):08x}"
        return None

    @property
    def is_weak(self) -> bool:
        """Whether the strongest hash is none that a change could not get past."""
        return _SHA256 not in self.hashes

    def hash(self) -> Hash:
        """A hash that has taken the header, and takes the data."""
        if _CRC32 in self.hashes and _SHA256 not in self.hashes:
            from loadkit.integrity.digests import Crc32

            return Crc32(self.hashed)
        return hashlib.sha256(self.hashed)


def read_tensor_headers(index: Index, *, verify: bool) -> list[TensorHeader]:
    """Every tensor's header, held against the index.

    Args:
        index: of the file.
        verify: refuse tensors without a hash, and compare the hashes of those without data.

    Raises:
        FormatError: E_HEADER, E_DTYPE or E_LAYOUT.
        IntegrityError: E_HASH.
        ReadFailure: it could not be read.
    """
    return list(_headers(index, verify))


def _headers(index: Index, verify: bool) -> Iterator[TensorHeader]:
    for entry in index.entries:
        raw = index.file.read(entry.offset, entry.start - entry.offset)
        yield parse_tensor_header(index, entry, raw, verify=verify)


def header_length(index: Index, entry: Entry, raw: bytes) -> int:
    """What the first 8 bytes say of a header's length, which the index knows.

    Raises:
        FormatError: E_HEADER.
    """
    (length,) = struct.unpack_from("<Q", raw)
    if length != entry.start - entry.offset:
        raise _wrong(
            index,
            entry,
            "E_HEADER",
            f"has a header of {length} bytes; its data begins after "
            f"{entry.start - entry.offset} bytes",
        )
    return int(length)


def parse_tensor_header(index: Index, entry: Entry, raw: bytes, *, verify: bool) -> TensorHeader:
    """One header from its bytes. Arguments and errors as of ``read_tensor_headers``."""
    header_length(index, entry, raw)
    fields = _Fields(index, entry, raw)
    found = fields.read()
    if not verify:
        return found
    if not found.hashes and not found.others:
        raise _unverified(index, entry, "has no hash, and a hash is required")
    if not entry.nbytes and not index.encrypted and found.digest is not None:
        digest = found.hash().hexdigest()
        if digest != found.digest:
            raise _unverified(
                index, entry, f"has the hash {found.digest}, and its header has {digest}"
            )
    return found


class _Fields:
    def __init__(self, index: Index, entry: Entry, raw: bytes) -> None:
        self.index, self.entry, self.raw = index, entry, raw
        self.at = 10  # after the length and the module's number

    def take(self, nbytes: int) -> bytes:
        """The next bytes."""
        data = self.raw[self.at : self.at + nbytes]
        if len(data) < nbytes:
            raise _wrong(self.index, self.entry, "E_HEADER", "has fields past its header's end")
        self.at += nbytes
        return data

    def sized(self, width: int, item: int = 1) -> bytes:
        """A field that says its own length."""
        return self.take(int.from_bytes(self.take(width), "little") * item)

    def read(self) -> TensorHeader:
        """All fields."""
        entry = self.entry
        (kind,) = self.take(1)
        name, dtype = self.sized(2), self.sized(1)
        self._check_dtype(dtype)
        shape = self.sized(1, 8 if entry.long else 4)
        begin = self.at + 2
        hashes, others, values = self._hashes(self.sized(2), begin)
        crypt_begin = self.at
        crypt = self.sized(8) if self.index.encrypted else b""
        crypt_end = self.at
        nbytes = int.from_bytes(self.take(8), "little", signed=True)
        if self.at != len(self.raw):
            raise _wrong(
                self.index,
                entry,
                "E_HEADER",
                f"has a header of {len(self.raw)} bytes, and its fields end after {self.at}",
            )
        self._check_same("kind", kind, entry.kind)
        self._check_same("name", name, entry.raw_name)
        self._check_same("dtype", dtype, entry.raw_dtype)
        form = f"<{len(entry.shape)}{'Q' if entry.long else 'I'}"
        self._check_same("shape", shape, struct.pack(form, *entry.shape))
        self._check_same("length of data", nbytes, entry.nbytes)
        hashed = bytearray(self.raw)
        for start, end in values:
            hashed[start:end] = bytes(end - start)
        del hashed[crypt_begin:crypt_end]
        encrypted = int.from_bytes(crypt[:8], "little") > 0
        return TensorHeader(entry, hashes, others, bytes(hashed), encrypted)

    def _check_dtype(self, raw: bytes) -> None:
        from loadkit_tensorizer.dtypes import dtype_of

        if dtype_of(raw) is None:
            shown = show(raw[:64].decode("latin-1"))
            raise _wrong(
                self.index, self.entry, "E_DTYPE", f"has dtype {shown}, which cannot be read"
            )

    def _check_same(self, what: str, found: object, expected: object) -> None:
        if found != expected:
            raise _wrong(
                self.index,
                self.entry,
                "E_LAYOUT",
                f"has another {what} in its header than in the index",
            )

    def _hashes(
        self, block: bytes, begin: int
    ) -> tuple[dict[int, bytes], tuple[int, ...], list[tuple[int, int]]]:
        """Known hashes, unknown types, and where the values lie in the header."""
        hashes: dict[int, bytes] = {}
        others: list[int] = []
        values: list[tuple[int, int]] = []
        at = 1
        if not block or not block[0]:
            return hashes, (), values  # whatever follows: nobody is told what it is
        for _ in range(block[0]):
            if at + 2 > len(block) or at + 2 + block[at + 1] > len(block):
                raise _wrong(self.index, self.entry, "E_HEADER", "has hashes past their field")
            kind, size = block[at], block[at + 1]
            value = block[at + 2 : at + 2 + size]
            values.append((begin + at + 2, begin + at + 2 + size))
            at += 2 + size
            if kind not in _SIZES:
                others.append(kind)
            elif size != _SIZES[kind] or kind in hashes:
                raise _unverified(self.index, self.entry, f"has a hash of type {kind} that is none")
            else:
                hashes[kind] = value
        if at != len(block):
            raise _wrong(self.index, self.entry, "E_HEADER", "has bytes after its hashes")
        return hashes, tuple(others), values


def _wrong(index: Index, entry: Entry, code: str, said: str) -> FormatError:
    return wrong(index.file, code, f"tensor {show(entry.name)} {said}", entry.offset, entry.name)


def _unverified(index: Index, entry: Entry, said: str) -> IntegrityError:
    return IntegrityError(
        f"{show(index.file.name)}: tensor {show(entry.name)} {said}",
        code="E_HASH",
        file=index.file.name,
        tensor=entry.name,
        offset=entry.offset,
        hint=f"{AGAIN}; verify_hash=false reads it as it is",
    )
