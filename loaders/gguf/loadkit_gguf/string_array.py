"""``StringArray``: an array of strings of a GGUF header, each decoded when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, overload

import numpy as np

from loadkit.errors import FormatError
from loadkit.file_checks import show

if TYPE_CHECKING:
    from loadkit.sources.base import File

__all__ = ["StringArray"]


class StringArray(Sequence[str]):
    """Reads like a list of strings. ``raw(i)`` are the bytes of one, ``decoded()`` is all of them.

    Args:
        what: what it is, for errors.
        file: the file it is from.
        data: all strings, each after its 64-bit length.
        ends: where each ends in ``data``; int64.
        offset: of ``data`` in the file.
    """

    def __init__(self, what: str, file: File, data: bytes, ends: np.ndarray, offset: int) -> None:
        self._what = what
        self._file = file
        self._data = data
        self._ends = ends
        self._offset = offset

    def __len__(self) -> int:
        return len(self._ends)

    def raw(self, index: int) -> bytes:
        """The bytes of string ``index``."""
        start, end = self._span(index)
        return self._data[start:end]

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        start, end = self._span(index)
        return self._decode(start, end)

    def __iter__(self) -> Iterator[str]:
        return iter(self.decoded())

    def decoded(self) -> list[str]:
        """Every string.

        Raises:
            FormatError: E_UTF8, one is not UTF-8; names it and its offset.
        """
        data, start, found = self._data, 8, []
        try:
            for end in self._ends.tolist():
                found.append(data[start:end].decode())
                start = end + 8
        except UnicodeDecodeError:
            self._decode(start, end)
        return found

    def _span(self, index: int) -> tuple[int, int]:
        count = len(self._ends)
        if not -count <= index < count:
            raise IndexError(f"{self._what} has {count} strings")
        index %= count
        return 8 + (int(self._ends[index - 1]) if index else 0), int(self._ends[index])

    def _decode(self, start: int, end: int) -> str:
        try:
            return self._data[start:end].decode()
        except UnicodeDecodeError as error:
            at = self._offset + start + error.start
            raise FormatError(
                f"{show(self._file.name)}, byte {at}: a string of {self._what} is not UTF-8",
                code="E_UTF8",
                file=self._file.name,
                offset=at,
            ) from None

    def __repr__(self) -> str:
        return f"StringArray({self._what}, {len(self)} strings)"
