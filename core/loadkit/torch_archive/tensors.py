"""What a pickle says of tensors, held against what its file holds."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping as Items
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from loadkit.file_checks import show
from loadkit.safetensors_format import MAX_DIM, MAX_DIMS, MAX_NAME_BYTES
from loadkit.tensor_info import TensorInfo, bits_of
from loadkit.torch_archive.errors import damaged, refused
from loadkit.torch_archive.lazies import OddTensor
from loadkit.torch_archive.values import StorageRef, TensorRef, kind_of

if TYPE_CHECKING:
    from loadkit.base_loader import Checksum
    from loadkit.sources.base import File

__all__ = ["Archive", "Extent", "Selected", "check_tensor_name", "place_tensors"]

_SHAPES = 4096  # kinds of shapes that are remembered; a model has few

Extent = tuple[int, int]
"""First byte, and how many."""


@dataclass(frozen=True)
class Archive:
    """What one file holds.

    Attributes:
        file: the file.
        tensors: in file order; a strided one reaches from its first byte to its last.
        odd: those that are not simply their bytes in order, by name.
        skipped: entries that are no tensors, or not in the dict that counts, with the reason.
        ties: names that are the same elements of one storage.
        metadata: for people: container, byte order, the key that was entered, ties.
        checksums: what the container itself keeps of ranges of its bytes.
    """

    file: File
    tensors: tuple[TensorInfo, ...]
    odd: Items[str, OddTensor] = field(default_factory=dict)
    skipped: Items[str, str] = field(default_factory=dict)
    ties: tuple[tuple[str, ...], ...] = ()
    metadata: Items[str, str] = field(default_factory=dict)
    checksums: tuple[Checksum, ...] = ()


@dataclass(frozen=True)
class Selected:
    """The dict that counts: its tensors by name, what is skipped, and the key it was under."""

    tensors: dict[str, TensorRef]
    skipped: dict[str, str]
    key: str | None


def place_tensors(
    selected: Selected,
    file: File,
    places: Items[str, Extent],
    *,
    big: bool,
    metadata: Items[str, str],
) -> Archive:
    """The tensors, each held against the bytes of its storage.

    Args:
        selected: the dict that counts.
        file: the archive.
        places: key of a storage -> where its bytes are.
        big: whether numbers are in big-endian order.
        metadata: what the container says of itself.

    Raises:
        FormatError: E_LAYOUT, a storage is missing or of another size, or a tensor reaches out of
            it; E_NAME; E_DTYPE.
    """
    placing = _Placing(file, places, big)
    for name, ref in selected.tensors.items():
        placing.add(name, ref)
    ties = placing.ties()
    told = {**metadata, **({"weights_key": selected.key} if selected.key else {})}
    if ties:
        told["ties"] = "; ".join(" = ".join(names) for names in ties)
    tensors = sorted(placing.tensors, key=lambda info: (info.offset, info.nbytes))
    return Archive(file, tuple(tensors), placing.odd, selected.skipped, ties, told)


class _Placing:
    """The work of ``place_tensors``: each kind of shape is computed once."""

    def __init__(self, file: File, places: Items[str, Extent], big: bool) -> None:
        self.file, self.places, self.big = file, places, big
        self.tensors: list[TensorInfo] = []
        self.odd: dict[str, OddTensor] = {}
        self._shapes: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, int, bool]] = {}
        self._starts: dict[str, tuple[int, int]] = {}  # key -> first byte, bytes
        self._same: dict[tuple[Any, ...], list[str]] = {}

    def add(self, name: str, ref: TensorRef) -> None:
        """One tensor."""
        check_tensor_name(self.file, name, ref.at)
        kind = ref.size, ref.stride
        shape = self._shapes.get(kind)
        if shape is None:
            shape = self._shape(name, ref)
            if len(self._shapes) < _SHAPES:
                self._shapes[kind] = shape
        numel, span, row_major = shape
        start, nbytes = self._starts.get(ref.storage.key) or self._start(name, ref.storage)
        item = bits_of(ref.dtype) // 8 or 1
        first = ref.offset * item
        if ref.offset < 0 or first + span * item > nbytes:
            self._layout(
                name,
                ref,
                f"reaches from byte {first} to {first + span * item} of a storage of {nbytes}",
            )
        size = ref.size
        if ref.dtype == "F4":  # a header counts the halves of torch's elements
            if not size or not row_major:
                self._layout(name, ref, "is of packed 4-bit numbers, and not in order")
            size = (*size[:-1], 2 * size[-1])
        info = TensorInfo(name, self.file, start + first, span * item, size, ref.dtype)
        self.tensors.append(info)
        if not row_major or (self.big and item > 1):
            swapped = self.big and item > 1
            self.odd[name] = OddTensor(info, None if row_major else ref.stride, swapped)
        if numel:
            self._same.setdefault((info.offset, ref.dtype, *kind), []).append(name)

    def ties(self) -> tuple[tuple[str, ...], ...]:
        """Names of the same elements."""
        return tuple(tuple(names) for names in self._same.values() if len(names) > 1)

    def _shape(self, name: str, ref: TensorRef) -> tuple[int, int, bool]:
        """Elements, elements from the first to the last, and whether they are in order."""
        size, stride = ref.size, ref.stride
        if len(size) != len(stride) or len(size) > MAX_DIMS:
            self._layout(name, ref, f"has {len(size)} sizes and {len(stride)} strides")
        for what, numbers in (("size", size), ("stride", stride)):
            for number in numbers:
                if type(number) is not int or not 0 <= number <= MAX_DIM:
                    told = number if type(number) is int else kind_of(number)
                    self._layout(name, ref, f"has {told} for a {what}; the limit is {MAX_DIM}")
        numel, span, row_major, expect = 1, 1, True, 1
        for n, s in zip(reversed(size), reversed(stride), strict=True):
            numel *= n
            span += (n - 1) * s
            row_major = row_major and (n == 1 or s == expect)
            expect *= n
        return (numel, span, row_major) if numel else (0, 0, True)

    def _start(self, name: str, storage: StorageRef) -> tuple[int, int]:
        """Where a storage's bytes begin, and how many they are, as the file and the pickle say."""
        place = self.places.get(storage.key)
        if place is None:
            self._layout(name, storage, f"is in storage {show(storage.key)}, which is not there")
        start, size = place
        item = bits_of(storage.dtype) // 8
        if storage.numel < 0 or not 0 <= size - storage.numel * item < item:
            self._layout(
                name,
                storage,
                f"is in storage {show(storage.key)}, which is said to have {storage.numel} "
                f"elements of {item} bytes, and has {size} bytes",
            )
        self._starts[storage.key] = start, size
        return start, size

    def _layout(self, name: str, ref: TensorRef | StorageRef, problem: str) -> NoReturn:
        raise damaged(
            "E_LAYOUT", self.file.name, f"tensor {show(name)} {problem}", offset=ref.at, tensor=name
        )


def check_tensor_name(file: File, name: str, at: int | None) -> None:
    """Refuse a name that no tensor may have; ``at`` is where it stands.

    Raises:
        FormatError: E_NAME.
    """
    if name.isascii() and name.isprintable() and 0 < len(name) <= MAX_NAME_BYTES:
        return
    size = len(name.encode())
    bad = any(unicodedata.category(char) == "Cc" for char in name)
    if size > MAX_NAME_BYTES or not size or bad:
        what = "holds control characters" if bad else f"has {size} bytes"
        raise refused(
            "E_NAME",
            file.name,
            f"the tensor's name {show(name)} {what}; 1 to {MAX_NAME_BYTES} are taken",
            "rename the tensor and save again",
            offset=at,
            tensor=name[:100],
        )
