"""The head of a tensorizer file: what it says of itself, and its index of tensors.

Nothing in it is believed: every length is held against what is left before it is used, and the
index has to describe tensors that follow each other without a gap up to the end of the file.

| bytes | what |
|---|---|
| 5 | ``|TZR|`` |
| 4 | version, 1 to 5 |
| 32 | flags, since version 4: encrypted, entries with a version |
| 8 | bytes of all tensors; programs write it differently, so it is not used |
| 8 | nothing |
| 8 | number of tensors |
| 8 | bytes of the index that follows; its rest is zeros |

Source: the layout that tensorizer 2.12 writes; versions 1 to 5 differ in what they may hold.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from loadkit.errors import FormatError
from loadkit.file_checks import HEAD_BYTES, show, sniff
from loadkit_tensorizer.dtypes import dtype_of
from loadkit_tensorizer.entries import STATE_DICT, Entry, Index
from loadkit_tensorizer.layout import check_layout, truncated, wrong
from loadkit_tensorizer.limits import (
    MAX_DIM,
    MAX_DIMS,
    MAX_INDEX_BYTES,
    MAX_TENSORS,
)
from loadkit_tensorizer.names import BadNameError, Names, parse_name

if TYPE_CHECKING:
    from loadkit.sources.base import File

__all__ = ["MAGIC", "read_index"]

MAGIC = b"|TZR|"
_HEAD = struct.Struct("<5sI32sQ8xQQ")
_LOCATION = struct.Struct("<QQQ")
_ENCRYPTED, _VERSIONED = 1, 2  # flags
_FIRST_FLAGS, _ENCRYPTION, _LONG = 4, 3, 5  # versions
_KINDS = (0, 1, STATE_DICT)  # parameter, buffer, entry of a state dict
_SHORTEST = 2 + 1 + 1 + 1 + 1 + _LOCATION.size  # bytes of an entry with a name of one letter


def read_index(file: File) -> Index:
    """Read and check a file's head.

    Raises:
        FormatError: E_HEADER, E_COUNT, E_LAYOUT, E_LIMIT, E_DTYPE, E_NAME or E_FORMAT.
        TruncatedError: the file ends before what its index describes.
        ReadFailure: it could not be read.
    """
    return _Reader(file).read()


class _Reader:
    def __init__(self, file: File) -> None:
        self.file = file
        self.version = self.at = 0
        self.versioned = False
        self.head = self.index = b""
        self.begin = _HEAD.size

    def wrong(
        self, code: str, said: str, *, offset: int | None = None, tensor: str | None = None
    ) -> FormatError:
        """An error about this file, at the place in the index that is read."""
        return wrong(
            self.file, code, said, self.begin + self.at if offset is None else offset, tensor
        )

    def read(self) -> Index:
        """The whole head."""
        count, encrypted = self._head()
        names, entries = Names(), list[Entry]()
        for number in range(count):
            entries.append(self._entry(number, count, names))
        if self.index.count(0, self.at) != len(self.index) - self.at:
            raise self.wrong(
                "E_COUNT", f"the index holds more than the {count} tensor(s) that the header counts"
            )
        check_layout(self.file, self.version, self.begin + len(self.index), entries)
        head = self.head + self.index
        return Index(self.file, self.version, encrypted, tuple(entries), head)

    def _head(self) -> tuple[int, bool]:
        file = self.file
        head = file.read(0, min(file.size, HEAD_BYTES))
        if len(head) < _HEAD.size or not head.startswith(MAGIC):
            raise self._not_one(head)
        magic, self.version, raw_flags, _, count, nbytes = _HEAD.unpack_from(head)
        if not 1 <= self.version <= _LONG:
            raise self.wrong(
                "E_HEADER",
                f"version {self.version} of the format; versions 1 to {_LONG} are known",
                offset=len(magic),
            )
        flags = int.from_bytes(raw_flags, "little")
        known = _ENCRYPTED | (_VERSIONED if self.version >= _LONG else 0)
        if flags & ~(known if self.version >= _FIRST_FLAGS else 0):
            raise self.wrong(
                "E_HEADER",
                f"flags {flags:#x} that version {self.version} does not have",
                offset=len(magic) + 4,
            )
        self.versioned = bool(flags & _VERSIONED)
        where = _HEAD.size - 8
        if nbytes > MAX_INDEX_BYTES:
            raise self.wrong(
                "E_LAYOUT",
                f"an index of {nbytes} bytes; the limit is {MAX_INDEX_BYTES}",
                offset=where,
            )
        if not 0 < count <= nbytes // _SHORTEST or count > MAX_TENSORS:
            raise self.wrong(
                "E_COUNT",
                f"{count} tensors cannot be in an index of {nbytes} bytes (at most {MAX_TENSORS})",
                offset=where - 8,
            )
        if _HEAD.size + nbytes > file.size:
            raise truncated(file, f"its index ends at byte {_HEAD.size + nbytes}", None)
        self.head, self.index = head[: _HEAD.size], file.read(_HEAD.size, nbytes)
        return count, self.version == _ENCRYPTION or bool(flags & _ENCRYPTED)

    def _not_one(self, head: bytes) -> FormatError:
        kind = sniff(head, self.file.size)
        if kind is not None and not head.startswith(MAGIC):
            what = {"lfs": "a Git LFS pointer, not the file itself", "html": "an HTML page"}
            said = what.get(kind, f"{kind}, not a tensorizer file")
            return self.wrong("E_FORMAT", f"its content is {said}", offset=0)
        if len(head) < _HEAD.size:
            said = f"it is {len(head)} bytes long; the shortest tensorizer file has more"
        else:
            said = "it does not begin as a tensorizer file does"
        return self.wrong("E_HEADER", said, offset=0)

    # -- entries ----------------------------------------------------------------------------------

    def _take(self, nbytes: int) -> bytes:
        data = self.index[self.at : self.at + nbytes]
        if len(data) < nbytes:
            raise _PastEndError
        self.at += nbytes
        return data

    def _number(self, nbytes: int) -> int:
        return int.from_bytes(self._take(nbytes), "little")

    def _entry(self, number: int, count: int, names: Names) -> Entry:
        begin = self.at
        try:
            return self._fields(names)
        except _PastEndError:
            error = self.wrong("E_LAYOUT", f"entry {number} of the index goes past its end")
        except BadNameError as problem:
            said = f"the name of entry {number} of the index {problem}"
            error = self.wrong("E_NAME", said)
        except FormatError as found:
            error = found
        if self.index.count(0, begin) == len(self.index) - begin:
            self.at = begin
            error = self.wrong(
                "E_COUNT", f"the index holds {number} tensor(s), and the header counts {count}"
            )
        raise error

    def _fields(self, names: Names) -> Entry:
        long = False
        if self.versioned:
            version = self._number(4)
            if version not in (1, _LONG):
                raise self.wrong("E_HEADER", f"an entry of version {version}")
            long = version == _LONG
        raw_name = self._take(self._number(2))
        path = parse_name(raw_name)
        stored = path[0] if len(path) == 1 and isinstance(path[0], str) else path
        kind = self._number(1)
        if kind != STATE_DICT and len(path) == 1:  # of the root module, "" and a dot go before it
            path = (str(path[0]).removeprefix(".") or path[0],)
        name = names.add(path)
        if len(path) > 1 and kind != STATE_DICT:
            raise BadNameError("is a path, and only state dicts have those")
        where = self.at
        raw_dtype = self._take(self._number(1))
        dims, width = self._number(1), 8 if long else 4
        shape = tuple(self._number(width) for _ in range(dims))
        offset, start, nbytes = _LOCATION.unpack(self._take(_LOCATION.size))
        dtype = dtype_of(raw_dtype)
        if kind not in _KINDS:
            raise self.wrong("E_LAYOUT", f"{show(name)} is of kind {kind}", tensor=name)
        if dtype is None:
            shown = show(raw_dtype[:64].decode("latin-1"))
            raise self.wrong(
                "E_DTYPE",
                f"{show(name)} has dtype {shown}, which cannot be read",
                tensor=name,
                offset=self.begin + where,
            )
        if dims > MAX_DIMS or max(shape, default=0) > MAX_DIM:
            raise self.wrong(
                "E_LIMIT",
                f"{show(name)} has {dims} dims, the largest {max(shape)}; the limits are "
                f"{MAX_DIMS} and {MAX_DIM}",
                tensor=name,
            )
        return Entry(
            name, stored, raw_name, raw_dtype, kind, dtype, shape, long, offset, start, nbytes
        )


class _PastEndError(Exception):
    """An entry goes past the end of the index."""
