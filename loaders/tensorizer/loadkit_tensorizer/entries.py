"""What the index of a tensorizer file says of each tensor, and what the file's head says."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadkit.tensor_info import bits_of

if TYPE_CHECKING:
    from loadkit.sources.base import File

__all__ = ["STATE_DICT", "Entry", "Index"]

STATE_DICT = 2  # the kind of an entry of a state dict


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the index.

    Attributes:
        name: with dots; of a module's own parameters without the dot that they are stored with.
        path: the stored name as the library has it: a text, or keys and positions.
        raw_name, raw_dtype: the stored bytes, for the tensor's own header.
        kind: 0 parameter, 1 buffer, 2 entry of a state dict.
        dtype: a name of ``DTYPES``, or "C128".
        shape: in elements.
        long: dims are stored in 8 bytes.
        offset: of its header; ``start``: of its data; ``nbytes``: of its data.
        is_meta: it is stored as a shape without data, and means zeros.
    """

    name: str
    path: str | tuple[str | int, ...]
    raw_name: bytes
    raw_dtype: bytes
    kind: int
    dtype: str
    shape: tuple[int, ...]
    long: bool
    offset: int
    start: int
    nbytes: int

    @property
    def end(self) -> int:
        """The byte after its data."""
        return self.start + self.nbytes

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def full_bytes(self) -> int:
        """Bytes of all elements, stored or not."""
        return self.numel * bits_of(self.dtype) // 8

    @property
    def is_meta(self) -> bool:
        """Whether it is stored without data."""
        return self.nbytes == 0 and self.numel > 0


@dataclass(frozen=True, slots=True)
class Index:
    """What a file's head says, checked.

    Attributes:
        file: the open file.
        version: of the format.
        encrypted: whether tensors may be encrypted.
        entries: in file order.
        head: the file's bytes up to the first tensor.
    """

    file: File
    version: int
    encrypted: bool
    entries: tuple[Entry, ...]
    head: bytes
