"""The start of a file, read in growing blocks, with the numbers and strings that lie in it.

The same for local and remote files: only ``File.read`` is used. Every length is held against the
file's size before anything is read or allocated for it.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from loadkit.errors import FormatError
from loadkit.file_checks import show

if TYPE_CHECKING:
    from loadkit.sources.base import File

__all__ = ["MAX_HEADER_BYTES", "MAX_STRINGS", "Window"]

MAX_HEADER_BYTES = 100_000_000
MAX_STRINGS = 4_000_000  # in all arrays of one file
_FIRST = 1 << 18  # bytes of the first block; later ones double what is there
_STEP = 1 << 20  # bytes looked at together when strings are walked

_U32 = struct.Struct("<I").unpack_from
_U64 = struct.Struct("<Q").unpack_from
_INT64 = np.dtype("<i8")


class Window:
    """Bytes 0 to ``len(data)`` of a file; ``pos`` is where the parser stands."""

    def __init__(self, file: File) -> None:
        self.file = file
        self.data = bytearray()
        self.pos = 0
        self._strings = 0

    @property
    def left(self) -> int:
        """Bytes of the file from ``pos`` on."""
        return self.file.size - self.pos

    def need(self, nbytes: int, code: str, what: str) -> int:
        """Have ``nbytes`` bytes from ``pos`` in ``data``; gives ``pos``.

        Raises:
            FormatError: ``code``, the file ends earlier; E_HEADER, the header is too long.
        """
        end = self.pos + nbytes
        if end > len(self.data):
            self._grow(end, code, what)
        return self.pos

    def _grow(self, end: int, code: str, what: str) -> None:
        if end > self.file.size:
            self.fail(code, f"{what} takes {end - self.pos} bytes, {self.left} are left", self.pos)
        if end > MAX_HEADER_BYTES:
            self.fail("E_HEADER", f"its header passes the limit of {MAX_HEADER_BYTES} bytes", end)
        have = len(self.data)
        upto = min(max(end, 2 * have, _FIRST), self.file.size, max(end, MAX_HEADER_BYTES))
        self.data += self.file.read(have, upto - have)

    def u32(self, what: str) -> int:
        """The next unsigned 32-bit number."""
        (value,) = _U32(self.data, self.need(4, "E_HEADER", what))
        self.pos += 4
        return int(value)

    def u64(self, what: str, code: str = "E_HEADER") -> int:
        """The next unsigned 64-bit number."""
        (value,) = _U64(self.data, self.need(8, code, what))
        self.pos += 8
        return int(value)

    def number(self, form: struct.Struct, what: str) -> Any:
        """The next number of a form."""
        (value,) = form.unpack_from(self.data, self.need(form.size, "E_HEADER", what))
        self.pos += form.size
        return value

    def string(self, what: str, most: int | None = None, most_code: str = "E_STRING") -> bytes:
        """The next string: a 64-bit length, and as many bytes.

        Raises:
            FormatError: E_STRING, it passes the file's end; ``most_code``, it is over ``most``.
        """
        at = self.pos
        size = self.u64(what, "E_STRING")
        if size > self.left:
            self.fail("E_STRING", f"{what} claims {size} bytes, {self.left} are left", at)
        if most is not None and size > most:
            self.fail(most_code, f"{what} is {size} bytes long; the limit is {most}", at)
        start = self.need(size, "E_STRING", what)
        self.pos += size
        return bytes(self.data[start : start + size])

    def block(self, nbytes: int, what: str) -> bytes:
        """The next ``nbytes`` bytes of an array, copied.

        Raises:
            FormatError: E_ARRAY, they pass the file's end.
        """
        start = self.need(nbytes, "E_ARRAY", what)
        self.pos += nbytes
        with memoryview(self.data) as view:
            return bytes(view[start : start + nbytes])

    def strings(self, count: int, what: str) -> tuple[bytes, np.ndarray, int]:
        """The next ``count`` strings, not decoded.

        Returns:
            Their bytes with the lengths between, where each ends in them (int64 [count]), and the
            offset of the first byte in the file.

        Raises:
            FormatError: E_ARRAY, more than ``MAX_STRINGS``; E_STRING, one passes the file's end.
        """
        self._strings += count
        if self._strings > MAX_STRINGS:
            message = f"{what} brings the strings to {self._strings}; the limit is {MAX_STRINGS}"
            self.fail("E_ARRAY", message, self.pos)
        start, at, left = self.pos, self.pos, count
        found: list[np.ndarray] = []
        quick = True
        while left:
            ends, quick = _string_ends(self.data, at, left, quick)
            if not len(ends):
                self.pos = at
                size = self.u64(what, "E_STRING")
                if size > self.left:
                    told = f"a string of {what} claims {size} bytes, {self.left} are left"
                    self.fail("E_STRING", told, at)
                self.need(size, "E_STRING", what)
                ends = np.array([self.pos + size], _INT64)  # a long one, or the next block's first
            found.append(ends)
            at, left = int(ends[-1]), left - len(ends)
        self.pos = at
        ends = np.concatenate(found) if found else np.zeros(0, _INT64)
        ends -= start
        ends.setflags(write=False)
        with memoryview(self.data) as view:
            return bytes(view[start:at]), ends, start

    def fail(
        self, code: str, message: str, offset: int, *, tensor: str | None = None, **more: Any
    ) -> NoReturn:
        """Raise the error of a broken rule.

        Raises:
            FormatError: always; ``code`` names the rule, ``offset`` is where it is broken.
        """
        message = f"{show(self.file.name)}, byte {offset}: {message}"
        raise FormatError(
            message, code=code, file=self.file.name, offset=offset, tensor=tensor, **more
        )


def _string_ends(data: bytearray, at: int, count: int, quick: bool) -> tuple[np.ndarray, bool]:
    """Where up to ``count`` strings from ``at`` end, as far as they lie in the next step of data.

    Strings of a vocabulary are short and hold no zeros, so eight bytes that are a small number are
    a length; a chain of them that fits is the list, found without a loop. ``quick`` says whether
    to try; the answer says whether it was worth it. What does not fit is walked one by one.
    """
    stop = min(len(data), at + _STEP)
    ends = np.zeros(0, _INT64)
    if quick and stop - at >= 16:
        ends = _chained(data, at, stop)[:count]
        if len(ends):
            at = int(ends[-1])
        quick = 2 * len(ends) >= min(count, 64)
    rest = _walked(data, at, stop, count - len(ends))
    return (np.concatenate([ends, rest]) if len(rest) else ends), quick


def _chained(data: bytearray, at: int, stop: int) -> np.ndarray:
    words = np.ndarray((stop - at - 7,), "<u8", data, at, (1,))
    starts = np.flatnonzero(words < 256)
    if not len(starts) or starts[0]:
        return np.zeros(0, _INT64)
    ends = starts + 8 + np.frombuffer(data, np.uint8, stop - at, at)[starts]
    broken = np.flatnonzero(starts[1:] != ends[:-1])
    ends = ends[: int(broken[0]) + 1] if len(broken) else ends
    return (ends[ends <= stop - at] + at).astype(_INT64)


def _walked(data: bytearray, at: int, stop: int, count: int) -> np.ndarray:
    ends: list[int] = []
    while len(ends) < count and at + 8 <= stop:
        at += 8 + _U64(data, at)[0]
        if at > stop:
            break
        ends.append(at)
    return np.array(ends, _INT64)
