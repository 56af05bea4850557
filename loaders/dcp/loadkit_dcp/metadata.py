"""What a ``.metadata`` says: tensors, their boxes, and where in which file each box lies.

Source: ``torch/distributed/checkpoint/metadata.py``, ``filesystem.py`` and ``default_planner.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn

from loadkit.errors import FormatError, PathError
from loadkit.file_checks import show
from loadkit.safetensors_format import MAX_DIM, MAX_DIMS, MAX_NAME_BYTES
from loadkit.sources.paths import check_name
from loadkit.tensor_info import bits_of
from loadkit.torch_archive.errors import damaged, refused
from loadkit.torch_archive.tensors import check_tensor_name
from loadkit.torch_archive.values import TORCH_DTYPES, Global, kind_of
from loadkit_dcp.machine import STRIDED, Instance, Items, MetadataMachine, Table

if TYPE_CHECKING:
    from loadkit.sources.base import File

__all__ = [
    "MAX_BOXES",
    "MAX_ENTRIES",
    "MAX_METADATA_BYTES",
    "Box",
    "Metadata",
    "Place",
    "Tensor",
    "read_metadata",
]

MAX_METADATA_BYTES = 256 << 20
MAX_ENTRIES = 1_000_000  # of a state dict
MAX_BOXES = 1 << 16  # of one tensor
MAX_PATH = 64  # keys on the way to an entry

Path = tuple["str | int", ...]
"""The keys that lead to an entry of the nested state dict that was saved."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an item lies: ``length`` bytes from ``offset`` of a file of the folder."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor: its first index and its size in every dimension, in elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place | None = None

    @property
    def numel(self) -> int:
        """Its elements."""
        return prod(self.sizes)


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the checkpoint, and the boxes that it is made of.

    ``dtype`` is a name of ``DTYPES``; ``size`` in elements of torch. ``at`` is where its entry
    stands in the metadata.
    """

    name: str
    dtype: str
    size: tuple[int, ...]
    boxes: tuple[Box, ...]
    at: int


@dataclass(frozen=True)
class Metadata:
    """One ``.metadata``, its entries not looked at yet.

    Attributes:
        file: its name.
        paths: every tensor's name -> the keys that lead to it; the name alone where nothing says.
        others: names of the entries that are no tensors.
        version: what it says of itself.
    """

    file: File
    paths: Mapping[str, Path]
    others: Sequence[str]
    version: str
    _entries: Mapping[str, Instance]
    _stored: Mapping[str, list[tuple[Instance, Any]]] = field(repr=False)

    def tensor(self, name: str) -> Tensor:
        """One tensor, checked: its dtype, its boxes, and that each is somewhere.

        Raises:
            FormatError: E_NAME, E_DTYPE, E_LAYOUT, E_UNSUPPORTED, E_STRUCTURE.
            PathError: a box is said to lie outside of the folder.
        """
        return _Reading(self, name).tensor()


def read_metadata(file: File) -> Metadata:
    """Read a ``.metadata`` file; nothing in it is run, nothing is imported.

    Raises:
        FormatError: E_PICKLE, it is no pickle of a checkpoint's metadata; E_STRUCTURE, it lacks
            what it has to say.
        ReadFailure: it could not be read.
    """
    if file.size > MAX_METADATA_BYTES or not file.size:
        what = "is empty" if not file.size else f"has {file.size} bytes"
        raise refused(
            "E_PICKLE",
            file.name,
            f"the metadata {what}; the limit is {MAX_METADATA_BYTES}",
            "it is no checkpoint's metadata, or the save was not finished",
            offset=0,
        )
    from loadkit.plan import collector_paused

    with collector_paused():
        machine = MetadataMachine(file.read(0, file.size), file.name)
        value = machine.run()
        if machine.at != file.size:
            left = file.size - machine.at
            raise damaged(
                "E_PICKLE", file.name, f"{left} bytes follow the pickle", offset=machine.at
            )
        return _metadata(file, value)


def _metadata(file: File, value: Any) -> Metadata:
    if type(value) is not Instance or value.kind != "Metadata":
        _structure(file, f"the pickle is {kind_of(value)}, not a checkpoint's metadata")
    entries, stored = value.get("state_dict_metadata"), value.get("storage_data")
    for what, table in (("state_dict_metadata", entries), ("storage_data", stored)):
        if type(table) is not Table or table.odd is not None:
            _structure(file, f"its {what} is {kind_of(table)}", value.at)
    if entries.pairs or (stored.items or ()):
        _structure(file, "its tables have keys of another kind", value.at)
    names: dict[str, Instance] = entries.items or {}
    if len(names) > MAX_ENTRIES:
        _structure(file, f"it has {len(names)} entries; the limit is {MAX_ENTRIES}", value.at)
    given = value.get("planner_data")
    planned = (given.items or {}) if type(given) is Table else {}
    paths: dict[str, Path] = {}
    others: list[str] = []
    listed = 0
    for name, entry in names.items():
        kind = entry.kind if type(entry) is Instance else kind_of(entry)
        if kind == "TensorStorageMetadata":
            paths[name] = _path(file, planned.get(name), entry.at) or (name,)
            listed += _listed(entry)
        elif kind == "BytesStorageMetadata":
            others.append(name)
        else:
            _structure(file, f"entry {show(name)} is {kind}", value.at)
    if listed > file.size:  # a list that is there once and stands for many
        _structure(file, f"its tensors have {listed} boxes, more than it has bytes", value.at)
    places: dict[str, list[tuple[Instance, Any]]] = {}
    for key, place in stored.pairs:
        name = key.get("fqn")
        if key.kind != "MetadataIndex" or type(name) is not str:
            _structure(file, f"its storage_data has {key.kind} for a key", key.at)
        places.setdefault(name, []).append((key, place))
    version = value.get("version")
    return Metadata(file, paths, others, version if type(version) is str else "", names, places)


def _listed(entry: Instance) -> int:
    """How many boxes a tensor is said to have."""
    chunks = entry.get("chunks")
    return len(chunks) if type(chunks) is Items else 0


def _path(file: File, given: Any, at: int) -> Path | None:
    """The keys to an entry, where the planner's mapping says them.

    Raises:
        FormatError: E_NAME, they make no name that a tensor may have.
    """
    if type(given) is not tuple or not 0 < len(given) <= MAX_PATH:
        return None
    keys: Path = given
    length = 0
    for key in keys:
        if type(key) is str:
            length += len(key)
        elif type(key) is not int or abs(key) > MAX_DIM:
            return None
    if length > MAX_NAME_BYTES:  # one key may stand in every path: such are never put together
        keys = tuple(str(key)[: MAX_NAME_BYTES + 1] for key in keys)
    check_tensor_name(file, ".".join(map(str, keys)), at)
    return keys


def _structure(file: File, problem: str, at: int = 0) -> NoReturn:
    raise refused(
        "E_STRUCTURE",
        file.name,
        problem,
        "it was not written by torch.distributed.checkpoint, or it is damaged; save it again",
        offset=at,
    )


class _Reading:
    """One tensor's entry, held against the rules."""

    def __init__(self, metadata: Metadata, name: str) -> None:
        self.metadata, self.name = metadata, name
        self.entry = metadata._entries[name]

    def tensor(self) -> Tensor:
        entry, name = self.entry, self.name
        check_tensor_name(self.metadata.file, name, entry.at)
        dtype = self._dtype(entry.get("properties"))
        size = self._numbers(entry.get("size"), "a size")
        if prod(size) * bits_of(dtype) >= 1 << 63:
            self._layout(f"is of {list(size)} elements, more than a file can hold")
        chunks = entry.get("chunks")
        if type(chunks) is not Items or len(chunks) > MAX_BOXES:
            what = f"{len(chunks)} boxes" if type(chunks) is Items else kind_of(chunks)
            self._layout(f"has {what}; the limit is {MAX_BOXES}")
        places = self._places()
        boxes: dict[tuple[int, ...], Box] = {}  # no two begin at one element
        for chunk in chunks:
            box = self._box(chunk, size, places)
            if (box.numel or not size) and boxes.setdefault(box.offsets, box) != box:
                self._layout(
                    f"is {list(size)}, and its element {list(box.offsets)} is in two boxes"
                )
        return Tensor(name, dtype, size, tuple(boxes.values()), entry.at)

    def _box(
        self, chunk: Any, size: tuple[int, ...], places: Mapping[tuple[int, ...], Place]
    ) -> Box:
        if type(chunk) is not Instance or chunk.kind != "ChunkStorageMetadata":
            self._layout("has something for a box that is none")
        offsets = self._numbers(chunk.get("offsets"), "a box")
        sizes = self._numbers(chunk.get("sizes"), "a box")
        if not len(offsets) == len(sizes) == len(size):
            self._layout(f"is {list(size)}, and a box of it {list(sizes)} at {list(offsets)}")
        if any(at + n > whole for at, n, whole in zip(offsets, sizes, size, strict=True)):
            self._layout(
                f"is {list(size)}, and a box of {list(sizes)} at {list(offsets)} reaches out of it"
            )
        place = places.get(offsets)
        if place is None and 0 not in sizes:
            self._layout(f"has a box at {list(offsets)}, and no file is said to hold it")
        return Box(offsets, sizes, place)

    def _dtype(self, properties: Any) -> str:
        state = properties.state if type(properties) is Instance else None
        if type(state) is Table:  # written by a version without a state of its own
            values = [(state.items or {}).get(name) for name in ("dtype", "layout")]
        elif type(state) is tuple and len(state) >= 2:
            values = list(state[:2])
        else:
            values = [None, None]
        found, layout = values
        dtype = None
        if type(found) is Global and found.module == "torch":
            dtype = TORCH_DTYPES.get(found.name)
        if dtype is None:
            self._refuse("E_DTYPE", f"is of {kind_of(found)}, which is no dtype that is read")
        if layout is not STRIDED and layout is not None:
            self._refuse("E_UNSUPPORTED", "is no strided tensor")
        return dtype

    def _places(self) -> dict[tuple[int, ...], Place]:
        """Where its boxes lie, by their first index."""
        found: dict[tuple[int, ...], Place] = {}
        for key, value in self.metadata._stored.get(self.name, ()):
            offset = self._numbers(key.get("offset"), "a box")
            place = self._place(value)
            if found.setdefault(offset, place) != place:
                self._layout(f"has its box at {list(offset)} twice")
        return found

    def _place(self, info: Any) -> Place:
        if type(info) is not Instance or info.kind != "_StorageInfo":
            self._refuse("E_UNSUPPORTED", "was not written to files of one folder")
        path, offset, length = (info.get(k) for k in ("relative_path", "offset", "length"))
        if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
            self._layout(f"has {kind_of(length)} at {kind_of(offset)} for a place", info.at)
        transforms = info.get("transform_descriptors")
        if transforms is not None and transforms != []:
            given = transforms if type(transforms) is Items else ()
            listed = [one for one in given if type(one) is str]
            named = ", ".join(map(show, listed[:10]))
            raise refused(
                "E_UNSUPPORTED",
                self.metadata.file.name,
                f"tensor {show(self.name)} went through {named or 'a transform'} when it was "
                "written: no part of it can be read by itself",
                "save the checkpoint again without _extensions",
                offset=info.at,
                tensor=self.name,
                transforms=listed[:10],
            )
        try:
            return Place(check_name(path), offset, length)
        except PathError as error:
            raise PathError(
                f"{show(self.metadata.file.name)}: tensor {show(self.name)}: {error.message}",
                file=self.metadata.file.name,
                tensor=self.name,
                offset=info.at,
                hint="the metadata leads out of its folder: do not trust it",
            ) from error

    def _numbers(self, given: Any, what: str) -> tuple[int, ...]:
        if type(given) is not tuple or len(given) > MAX_DIMS:
            shown = f"{len(given)} numbers" if type(given) is tuple else kind_of(given)
            self._layout(f"has {shown} for {what}")
        for number in given:
            if type(number) is not int or not 0 <= number <= MAX_DIM:
                shown = str(number)[:40] if type(number) is int else kind_of(number)
                self._layout(f"has {shown} in {what}; the limit is {MAX_DIM}")
        return given

    def _layout(self, problem: str, at: int | None = None) -> NoReturn:
        raise self._error("E_LAYOUT", problem, at)

    def _refuse(self, code: str, problem: str) -> NoReturn:
        raise self._error(code, problem, None)

    def _error(self, code: str, problem: str, at: int | None) -> FormatError:
        return damaged(
            code,
            self.metadata.file.name,
            f"tensor {show(self.name)} {problem}",
            offset=self.entry.at if at is None else at,
            tensor=self.name,
        )
