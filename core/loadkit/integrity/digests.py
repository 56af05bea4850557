"""What a file should hold: digests of units of it, and the answer when one differs.

Digests are SHA-256; where nobody has one, what a format keeps itself counts: a zip's CRC-32.

A unit is a range of bytes that has one digest: a block, a tensor, or the whole file. It is the
least that has to be read to verify any byte of it.
"""

from __future__ import annotations

import hashlib
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from loadkit.errors import IntegrityError
from loadkit.file_checks import show

if TYPE_CHECKING:
    from loadkit.sources.base import File

__all__ = ["BLOCK", "Crc32", "FileDigests", "Hash", "NamesIn", "blocks_of", "mismatch"]

BLOCK = 4 << 20  # bytes of a block, and of what is hashed at once

_KINDS = {"sha256": ("E_DIGEST", "SHA-256"), "crc32": ("E_CRC", "CRC-32")}


class Hash(Protocol):
    """What ``hashlib`` makes."""

    @property
    def name(self) -> str:
        """The algorithm's."""

    def update(self, data: memoryview | bytes, /) -> None:
        """The next bytes."""

    def hexdigest(self) -> str:
        """Of all bytes so far."""


class Crc32:
    """A CRC-32 as a hash."""

    name = "crc32"

    def __init__(self, data: bytes = b"") -> None:
        self._value = zlib.crc32(data)

    def update(self, data: memoryview | bytes, /) -> None:
        """The next bytes."""
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        """Of all bytes so far."""
        return f"{self._value:08x}"


NamesIn = Callable[["File", int, int], list[str]]
"""Names of the tensors that have bytes in a range of a file."""


@dataclass(eq=False)
class FileDigests:
    """One file's units, in order and without overlap, with the digests that they should have.

    Attributes:
        file: the open file.
        origin: who says so, as a phrase: "the manifest".
        advice: what to do when one differs.
        starts, ends: the units' first bytes and the bytes after their last.
        digests: in hex; None: not known, it is recorded.
        whole: the file's SHA-256, if somebody who can be trusted with it gave it.
        records: whether digests of blocks are kept for later loads.
        algorithm: of ``digests``: "sha256" or "crc32".
        begin: makes the hash of a unit, by its number, where a digest is of more than the unit's
            bytes: what goes before them is in it already. None: ``algorithm`` of the bytes.
        code: of the error; None: the algorithm's.
        remark: a warning about the digests, for the report.
        found: block number -> digest, as computed by this load.
    """

    file: File
    origin: str
    advice: str
    starts: list[int]
    ends: list[int]
    digests: list[str | None]
    whole: str | None = None
    records: bool = False
    algorithm: str = "sha256"
    begin: Callable[[int], Hash] | None = None
    code: str | None = None
    remark: str = ""
    found: dict[int, str] = field(default_factory=dict)

    def touching(self, start: int, end: int) -> range:
        """Numbers of the units that have bytes in ``[start, end)``."""
        if start >= end:
            return range(0)
        return range(bisect_right(self.ends, start), bisect_left(self.starts, end))

    def unit(self, number: int) -> tuple[int, int]:
        """A unit's range of bytes."""
        return self.starts[number], self.ends[number]

    def hash_of(self, number: int) -> Hash:
        """A hash that takes a unit's bytes."""
        if self.begin is not None:
            return self.begin(number)
        return Crc32() if self.algorithm == "crc32" else hashlib.sha256()


def blocks_of(size: int) -> tuple[list[int], list[int]]:
    """The starts and ends of a file's blocks."""
    starts = list(range(0, size, BLOCK))
    return starts, [min(start + BLOCK, size) for start in starts]


def mismatch(digests: FileDigests, number: int, found: str, names: NamesIn) -> IntegrityError:
    """The error of a unit that holds other bytes."""
    file = digests.file
    start, end = digests.unit(number)
    tensors = names(file, start, end)
    shown = ", ".join(map(show, tensors[:3]))
    if len(tensors) > 3:
        shown += f" and {len(tensors) - 3} more"
    code, kind = _KINDS[digests.hash_of(number).name]
    inside = f"; in them lie {shown}" if tensors else "; no tensor lies there"
    return IntegrityError(
        f"bytes {start} to {end} of {show(file.name)} are not what they should be: "
        f"{digests.origin} says {kind} {digests.digests[number]}, they have {found}{inside}",
        code=digests.code or code,
        file=file.name,
        tensor=tensors[0] if tensors else None,
        offset=start,
        detail={
            "extent": [start, end],
            "tensors": tensors,
            "expected": digests.digests[number],
            "found": found,
            "origin": digests.origin,
        },
        hint=digests.advice,
    )
