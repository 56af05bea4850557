"""The zip archive that ``torch.save`` writes: its pickle, and the records that storages are in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from loadkit.torch_archive.errors import damaged, refused
from loadkit.torch_archive.machine import MAX_PICKLE_BYTES, Machine
from loadkit.torch_archive.tensors import Extent
from loadkit.torch_archive.zip_directory import Record, check_records

if TYPE_CHECKING:
    from loadkit.base_loader import Checksum
    from loadkit.sources.base import File

__all__ = ["Contents", "checksums_of", "read_contents"]

_PICKLE = "data.pkl"


@dataclass(frozen=True)
class Contents:
    """What an archive holds.

    Attributes:
        value: of its pickle, as ``Machine`` gives it.
        places: key of a storage -> where its bytes are.
        big: whether numbers are in big-endian order.
    """

    value: Any
    places: Mapping[str, Extent]
    big: bool


def read_contents(file: File, records: dict[str, Record], directory: int) -> Contents:
    """Read an archive's pickle, and find its records. No byte of a tensor is read.

    Args:
        file: the archive.
        records, directory: what ``read_directory`` gave.

    Raises:
        FormatError: E_ZIP, E_PICKLE, E_STRUCTURE, E_UNSUPPORTED, E_LAYOUT.
        ReadFailure: the file could not be read.
    """
    pickles = [name for name in records if name == _PICKLE or name.endswith(f"/{_PICKLE}")]
    pickles = [name for name in pickles if name.count("/") <= 1]
    if len(pickles) != 1:
        what = f"{len(pickles)} records data.pkl" if pickles else "no record data.pkl"
        raise refused(
            "E_ZIP", file.name, f"the archive has {what}", "it is no archive of torch.save"
        )
    check_records(file, records, directory)
    root = pickles[0].removesuffix(_PICKLE)
    big = _is_big(file, records.get(f"{root}byteorder"))
    value = _unpickled(file, records[pickles[0]])
    start = len(f"{root}data/")
    places = {
        name[start:]: (record.start, record.size)
        for name, record in records.items()
        if name.startswith(f"{root}data/")
    }
    return Contents(value, places, big)


def checksums_of(records: Iterable[Record]) -> tuple[Checksum, ...]:
    """Every record's CRC-32, in file order; 0 is what a writer that computes none leaves."""
    kept = (each for each in records if each.size)
    return tuple(
        (each.start, each.start + each.size, f"{each.crc:08x}" if each.crc else None)
        for each in sorted(kept, key=lambda each: each.start)
    )


def _is_big(file: File, record: Record | None) -> bool:
    """Whether numbers are big-endian; archives before torch 2.1 do not say: little."""
    if record is None:
        return False
    said = file.read(record.start, min(record.size, 16))
    if said not in (b"little", b"big"):
        raise damaged(
            "E_LAYOUT", file.name, f"the byte order is said to be {said!r}", offset=record.start
        )
    return said == b"big"


def _unpickled(file: File, record: Record) -> Any:
    """The value of the one pickle in a record."""
    if record.size > MAX_PICKLE_BYTES:
        _bad_pickle(
            file, f"the pickle has {record.size} bytes; the limit is {MAX_PICKLE_BYTES}", record
        )
    machine = Machine(file.read(record.start, record.size), file.name, record.start)
    value = machine.run()
    if machine.at != record.size:
        _bad_pickle(file, f"{record.size - machine.at} bytes follow the pickle", record, machine.at)
    return value


def _bad_pickle(file: File, problem: str, record: Record, at: int = 0) -> NoReturn:
    raise damaged("E_PICKLE", file.name, problem, offset=record.start + at)
