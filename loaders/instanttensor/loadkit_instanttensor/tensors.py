"""Where the tensors of safetensors files lie: the library gives tensors, a plan wants bytes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from loadkit.errors import ReadError
from loadkit.readers.base import Extent, Place
from loadkit.safetensors_format import read_header
from loadkit.text import printable

if TYPE_CHECKING:
    from loadkit.sources.base import File

__all__ = ["Located", "Tensors"]


class Located(NamedTuple):
    """A tensor of a file: the bytes ``[start, end)`` of it."""

    file: File
    name: str
    start: int
    end: int


class Tensors:
    """Finds the tensor that an extent is a part of. Reads each file's header once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[list[int], list[Located]]] = {}

    def of(self, item: Extent | Place) -> Located:
        """The tensor.

        Raises:
            ReadError: the file is no safetensors file of this machine, or no tensor holds all of
                the bytes.
        """
        file = item.file
        starts, found = self._tensors(file)
        at = bisect_right(starts, item.offset) - 1
        end = item.offset + (item.rows - 1) * item.file_stride + item.row_bytes
        if at < 0 or end > found[at].end:
            raise ReadError(
                f"bytes {item.offset} to {end} of {printable(file.name)} are not of one tensor, "
                "and the reader 'instanttensor' brings tensors",
                file=file.name,
                tensor=item.tensor,
                offset=item.offset,
                hint="name another reader: reader='pread'",
            )
        return found[at]

    def _tensors(self, file: File) -> tuple[list[int], list[Located]]:
        if id(file) not in self._known:
            if file.path is None or not file.name.endswith(".safetensors"):
                raise ReadError(
                    f"{printable(file.name)} is no safetensors file of this machine, and the "
                    "reader 'instanttensor' reads no others",
                    file=file.name,
                    hint="name another reader: reader='pread'",
                )
            found = [
                Located(file, info.name, info.offset, info.offset + info.nbytes)
                for info in read_header(file).tensors
                if info.nbytes
            ]
            found.sort(key=lambda one: one.start)
            self._known[id(file)] = [one.start for one in found], found
        return self._known[id(file)]


def total(tensors: Sequence[Located]) -> int:
    """Bytes of some tensors."""
    return sum(one.end - one.start for one in tensors)
