"""What a pickle says of tensors, held against what its file holds.

Which dict counts:

1. ``weights_key`` names it: a key of the top-level dict (``a/b``: of a dict inside that one);
2. else the top-level dict, if a tensor is directly in it;
3. else the only dict in it that holds tensors directly; of several none is guessed.

Everything beside it, and all in it that is no tensor, is listed as skipped.
"""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Mapping as Items
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from loadkit.errors import OptionError
from loadkit.file_checks import show
from loadkit.safetensors_format import MAX_DIM, MAX_DIMS, MAX_NAME_BYTES, MAX_TENSORS
from loadkit.tensor_info import TensorInfo, bits_of
from loadkit.text import nearest
from loadkit_default.pt.errors import damaged, refused
from loadkit_default.pt.lazies import OddTensor
from loadkit_default.pt.values import Mapping, StorageRef, TensorRef, kind_of

if TYPE_CHECKING:
    from loadkit.base_loader import Checksum
    from loadkit.sources.base import File

__all__ = ["Archive", "Extent", "Selected", "place_tensors", "select"]

logger = logging.getLogger(__name__)

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


def select(value: Any, file: File, weights_key: str | None) -> Selected:
    """The dict of tensors in a pickle's value.

    Raises:
        FormatError: E_STRUCTURE, it is no dict, its keys are no strings, it holds no tensors, or
            several dicts in it do; E_NAME, a tensor's name is empty, too long, or unprintable.
        OptionError: nothing is under ``weights_key``; the error lists the keys.
    """
    top = _dict(value, file, "the pickle")
    skipped: dict[str, str] = {}
    key = weights_key
    if key is not None:
        chosen = _entered(top, key, file, skipped)
    else:
        chosen = top
        inner = {} if _tensors(top) else _holders(top)
        if len(inner) == 1:
            key, chosen = next(iter(inner.items()))
            logger.info("%s: %s is the only dict with tensors", show(file.name), show(key))
            _skip_others(top, key, "", skipped)
        elif inner:
            _several(file, inner)
    found = _tensors(chosen)
    if not found and chosen.items:
        _wrong(file, f"there is no tensor in a dict of {len(chosen.items)}", _keys(chosen))
    if len(found) > MAX_TENSORS:
        _wrong(file, f"there are more than {MAX_TENSORS} tensors", "")
    prefix = "" if key is None else f"{key}/"
    for name, item in (chosen.items or {}).items():
        if type(item) is not TensorRef:
            holds = len(_tensors(item)) if type(item) is Mapping else 0
            more = f" with {holds} tensors: weights_key={prefix + name!r} reads it" if holds else ""
            skipped[prefix + name] = f"no tensor but {kind_of(item)}{more}"
    return Selected(found, skipped, key)


def _dict(value: Any, file: File, what: str) -> Mapping:
    if type(value) is not Mapping:
        _wrong(file, f"{what} is {kind_of(value)}, not a dict of tensors", "")
    if value.odd is not None:
        kind, at = value.odd
        raise refused(
            "E_STRUCTURE", file.name, f"a key of {what} is {kind}, not a string", _HINT, offset=at
        )
    return value


_HINT = "save a plain dict of tensors: torch.save(model.state_dict(), ...)"


def _wrong(file: File, problem: str, more: str) -> NoReturn:
    raise refused("E_STRUCTURE", file.name, problem, more or _HINT)


def _tensors(found: Mapping) -> dict[str, TensorRef]:
    items = found.items or {}
    return {name: item for name, item in items.items() if type(item) is TensorRef}


def _holders(top: Mapping) -> dict[str, Mapping]:
    """The dicts directly in it that hold a tensor directly."""
    inner = ((name, item) for name, item in (top.items or {}).items() if type(item) is Mapping)
    return {
        name: item
        for name, item in inner
        if any(type(value) is TensorRef for value in (item.items or {}).values())
    }


def _entered(top: Mapping, key: str, file: File, skipped: dict[str, str]) -> Mapping:
    """The dict under a key, or under the keys of a path."""
    if type((top.items or {}).get(key)) is Mapping:
        path = [key]
    else:
        path = key.split("/")
    here, before = top, ""
    for part in path:
        item = (here.items or {}).get(part)
        if type(item) is not Mapping:
            names = [name for name, each in (here.items or {}).items() if type(each) is Mapping]
            near = nearest(part, names, 3)
            raise OptionError(
                f"LoadConfig.weights_key = {key!r}: {show(file.name)} has "
                f"{'no such key' if item is None else kind_of(item) + ' there'}; dicts are under "
                f"{', '.join(map(show, names[:10])) or 'no key'}",
                file=file.name,
                detail={"keys": names[:100], "nearest": near},
                hint=f"did you mean {show(near[0])}?" if near else None,
            )
        _skip_others(here, part, before, skipped)
        here, before = item, f"{before}{part}/"
    return _dict(here, file, f"what {show(key)} holds")


def _skip_others(parent: Mapping, key: str, before: str, skipped: dict[str, str]) -> None:
    for name, item in (parent.items or {}).items():
        if name != key:
            skipped[before + name] = f"beside {show(key)}: {kind_of(item)}"


def _several(file: File, inner: Items[str, Mapping]) -> NoReturn:
    told = ", ".join(f"{show(n)} ({len(_tensors(m))} tensors)" for n, m in list(inner.items())[:10])
    raise refused(
        "E_STRUCTURE",
        file.name,
        f"no tensor is at the top, and {len(inner)} dicts hold tensors: {told}",
        f"say which by weights_key={next(iter(inner))!r}",
        keys=list(inner)[:100],
    )


def _keys(found: Mapping) -> str:
    names = [show(name) for name in found.items or ()]
    return f"its keys are {', '.join(names[:10])}" + (" ..." if len(names) > 10 else "")


# -- tensors against the file ---------------------------------------------------------------------


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
        _check_name(self.file, name, ref.at)
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


def _check_name(file: File, name: str, at: int) -> None:
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
