"""What ``torch.save`` wrote before 1.6: five pickles, then every storage after its count.

A magic number, a protocol version, facts of the machine, the object, and the keys of the storages
in the order that they follow in: 8 bytes of count (little-endian, in elements), then the numbers.

Source: ``torch/serialization.py``, ``_legacy_save``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from loadkit.file_checks import show
from loadkit.tensor_info import bits_of
from loadkit.torch_archive.errors import damaged, refused
from loadkit.torch_archive.machine import MAX_PICKLE_BYTES, Machine, MoreNeededError
from loadkit.torch_archive.tensors import Archive, Extent, place_tensors
from loadkit.torch_archive.values import Mapping, StorageRef
from loadkit_default.pt.state_dict import select

if TYPE_CHECKING:
    from loadkit.sources.base import File

__all__ = ["read_legacy"]

_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
_FIRST = 64 << 10  # bytes that are read first; the pickles of most files are in them
_COUNT = 8


def read_legacy(file: File, weights_key: str | None) -> Archive:
    """Read a pre-zip file's pickles and the counts of its storages.

    Raises:
        FormatError: E_PICKLE, E_STRUCTURE, E_UNSUPPORTED; E_LAYOUT, storages and keys do not match,
            or do not fill the file.
        OptionError: there is nothing under ``weights_key``.
        ReadFailure: the file could not be read.
    """
    size = min(file.size, _FIRST)
    while True:
        try:
            return _Legacy(file, size).read(weights_key)
        except MoreNeededError:
            if size >= MAX_PICKLE_BYTES:
                _pickle(file, f"the pickles go on past {MAX_PICKLE_BYTES} bytes", size)
            size = min(file.size, 4 * size, MAX_PICKLE_BYTES)


def _pickle(file: File, problem: str, at: int) -> NoReturn:
    raise refused(
        "E_PICKLE",
        file.name,
        problem,
        "it is no checkpoint of torch.save, or it is damaged",
        offset=at,
    )


class _Legacy:
    """One attempt, with the first ``size`` bytes at hand."""

    def __init__(self, file: File, size: int) -> None:
        self.file = file
        self.owners: dict[str, str] = {}  # key of a storage -> a tensor in it
        self.machine = Machine(file.read(0, size), file.name, complete=size == file.size)

    def read(self, weights_key: str | None) -> Archive:
        """The archive."""
        magic = self._next()
        if type(magic) is not int or magic != _MAGIC:
            _pickle(self.file, "the pickle does not begin with torch's magic number", 0)
        at = self.machine.at
        if self._next() != _PROTOCOL:
            _pickle(self.file, f"the format is not of version {_PROTOCOL}", at)
        at = self.machine.at
        facts = self._next()
        if type(facts) is not Mapping or type((facts.items or {}).get("little_endian")) is not bool:
            _pickle(self.file, "nothing is said of the machine it was written on", at)
        big = not (facts.items or {})["little_endian"]
        value = self._next()
        storages = self.machine.storages
        keys = self._keys(storages)
        selected = select(value, self.file, weights_key)
        self.owners = {ref.storage.key: name for name, ref in selected.tensors.items()}
        places = self._places(keys, storages)
        metadata = {"format": "torch pickle (before 1.6)", "byteorder": "big" if big else "little"}
        return place_tensors(selected, self.file, places, big=big, metadata=metadata)

    def _next(self) -> Any:
        return self.machine.run(self.machine.at)

    def _keys(self, storages: dict[str, StorageRef]) -> list[str]:
        """The keys in file order."""
        at = self.machine.at
        keys: list[Any] = self.machine.run_list(at)
        if any(type(key) is not str for key in keys) or len(set(keys)) != len(keys):
            self._layout("the keys of the storages are no strings, or not each its own", at)
        if set(keys) != storages.keys():
            odd = sorted(set(keys) ^ storages.keys())
            self._layout(f"the list of storages and the tensors differ in {show(odd[0])}", at)
        return keys

    def _places(self, keys: list[str], storages: dict[str, StorageRef]) -> dict[str, Extent]:
        """Where each storage's numbers lie; together they fill the file."""
        file, at = self.file, self.machine.at
        found: dict[str, Extent] = {}
        for key in keys:
            storage = storages[key]
            count = int.from_bytes(self._count(key, at), "little")
            if count != storage.numel:
                self._layout(
                    f"storage {show(key)} has {count} elements in the file, "
                    f"{storage.numel} by the pickle",
                    at,
                    key,
                )
            nbytes = count * (bits_of(storage.dtype) // 8)
            at += _COUNT
            if nbytes > file.size - at:
                self._layout(
                    f"storage {show(key)} of {nbytes} bytes does not fit into the "
                    f"{file.size - at} that are left",
                    at,
                    key,
                )
            found[key] = at, nbytes
            at += nbytes
        if at != file.size:
            self._layout(f"{file.size - at} bytes follow the last storage", at)
        return found

    def _count(self, key: str, at: int) -> bytes:
        if at + _COUNT > self.file.size:
            self._layout(f"storage {show(key)} is not there", self.file.size, key)
        return self.file.read(at, _COUNT)

    def _layout(self, problem: str, at: int, key: str = "") -> NoReturn:
        name = self.owners.get(key)
        of = "" if name is None else f" (of tensor {show(name)})"
        raise damaged("E_LAYOUT", self.file.name, problem + of, offset=at, tensor=name)
