"""The directory of a zip archive, as far as ``torch.save`` uses zip: stored records, one disk.

Every record is checked twice, against the directory and against its own local header, and no two
may share a byte. Nothing is inflated: a compressed record is refused. Time and memory are linear
in the directory, whose size is limited.

Of a remote file, local headers are not fetched one by one where the directory alone leaves one
place for the data: ``torch.save`` begins each record's data at the next multiple of 64 bytes, and
what follows it is a descriptor of 16 or 24 bytes, and then the next record.

Source: APPNOTE.TXT 6.3 (the zip format), sections 4.3 and 4.5.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from loadkit.torch_archive.errors import damaged, refused

if TYPE_CHECKING:
    from loadkit.sources.base import File

__all__ = ["MAX_DIRECTORY_BYTES", "MAX_RECORDS", "Record", "check_records", "read_directory"]

MAX_DIRECTORY_BYTES = 100_000_000
MAX_RECORDS = 1_000_000
MAX_NAME_BYTES = 1024

_END = struct.Struct("<4s4H2IH")
_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_LONG = struct.Struct("<Q")
_U16, _U32 = 0xFFFF, 0xFFFFFFFF
_ALIGN = 64  # of a record's data, as torch.save lays it out
_DESCRIPTORS = (16, 24)  # bytes behind the data
_ENCRYPTED = 0x1 | 0x40 | 0x2000
_SIZES_FOLLOW = 0x8  # the local header may say 0: a descriptor behind the data has the sizes


@dataclass(slots=True)
class Record:
    """One record. ``start``: of its data, once ``check_records`` has run; else of its header.

    Attributes:
        name: with the archive's top folder; data, never a path.
        size: bytes of its data.
        crc: CRC-32 of its data; 0 where the writer left it out.
        header: first byte of its local header.
    """

    name: str
    raw_name: bytes
    flags: int
    method: int
    size: int
    packed: int
    crc: int
    header: int
    start: int = 0


def read_directory(file: File) -> tuple[dict[str, Record], int]:
    """The records by name, in the directory's order, and the byte where the directory begins.

    Raises:
        FormatError: E_PICKLE, the archive ends before its directory; E_ZIP, the directory breaks a
            rule, names a record twice, or lies outside of the file.
        ReadFailure: the file could not be read.
    """
    count, size, start = _end(file)
    if count > MAX_RECORDS or size > MAX_DIRECTORY_BYTES:
        _wrong(file, f"the directory has {count} records in {size} bytes: too many", start)
    if count * _ENTRY.size > size:
        _wrong(file, f"{count} records do not fit into a directory of {size} bytes", start)
    data = file.read(start, size)
    found: dict[str, Record] = {}
    at = 0
    for _ in range(count):
        record, at = _entry(file, data, at, start)
        if record.name in found:
            _wrong(file, f"record {record.name[:100]!r} is there twice", record.header)
        found[record.name] = record
    if at != size:
        _wrong(file, f"{size - at} bytes of the directory belong to no record", start + at)
    return found, start


def check_records(file: File, records: dict[str, Record], directory: int) -> None:
    """Find every record's data by its local header, which has to agree with the directory.

    Args:
        file: the archive.
        records: what ``read_directory`` gave; ``start`` is filled in.
        directory: the byte where the directory begins.

    Raises:
        FormatError: E_ZIP, a record is compressed or encrypted, its header says something else, or
            two share bytes.
        ReadFailure: the file could not be read.
    """
    before = 0
    last = ""
    ordered = sorted(records.values(), key=lambda each: each.header)
    nexts = [*(record.header for record in ordered[1:]), directory]
    for record, following in zip(ordered, nexts, strict=True):
        if record.flags & _ENCRYPTED:
            _wrong(file, f"record {record.name!r} is encrypted", record.header)
        if record.method or record.packed != record.size:
            _wrong(
                file,
                f"record {record.name!r} is compressed (method {record.method}, {record.packed} "
                f"bytes for {record.size}); torch.save never does that",
                record.header,
            )
        if record.header < before:
            _wrong(file, f"records {last!r} and {record.name!r} overlap", record.header)
        record.start = 0 if file.local else _only_start(record, following)
        if not record.start:
            record.start = _data_start(file, record, directory)
        before, last = record.start + record.size, record.name
        if before > directory:
            _wrong(file, f"record {record.name!r} runs into the directory", record.header)
    first = min((record.header for record in records.values()), default=0)
    if first:
        _wrong(file, f"{first} bytes lie before the first record", 0)


# -- the end of the file -------------------------------------------------------------------------


def _end(file: File) -> tuple[int, int, int]:
    """How many records, and the directory's size and first byte."""
    tail = file.read(max(0, file.size - _END.size), min(file.size, _END.size))
    if not tail.startswith(b"PK\x05\x06"):  # a comment follows, or there is none
        tail = file.read(max(0, file.size - _END.size - _U16), min(file.size, _END.size + _U16))
    at = tail.rfind(b"PK\x05\x06", 0, max(0, len(tail) - _END.size) + 4)
    where = file.size - len(tail) + at
    if at < 0:
        raise damaged(
            "E_PICKLE",
            file.name,
            "the zip archive ends before its directory: its pickle cannot be found",
            offset=file.size,
        )
    _, disk, first_disk, here, count, size, start, comment = _END.unpack_from(tail, at)
    if at + _END.size + comment != len(tail):
        _wrong(file, "bytes follow the end of the archive", where + _END.size + comment)
    after = where
    if _U16 in (here, count) or _U32 in (size, start) or _has_locator(file, where):
        here, count, size, start, after = _end64(file, where)
    if disk not in (0, _U16) or first_disk not in (0, _U16) or here != count:
        _wrong(file, "the archive is a part of one on several disks", where)
    if start > file.size or size > file.size or start + size != after:
        _wrong(
            file,
            f"the directory is said to be bytes {start} to {start + size}, and ends at {after}",
            where,
        )
    return count, size, start


def _has_locator(file: File, end: int) -> bool:
    """Whether a zip64 locator stands before the end record."""
    at = end - _LOCATOR.size
    return at >= 0 and file.read(at, 4) == b"PK\x06\x07"


def _end64(file: File, end: int) -> tuple[int, int, int, int, int]:
    """Records here, in all, the directory's size and first byte, and where it has to end."""
    at = end - _LOCATOR.size
    if not _has_locator(file, end):
        _wrong(file, "the zip64 locator is missing", max(at, 0))
    _, disk, where, disks = _LOCATOR.unpack(file.read(at, _LOCATOR.size))
    if disk or disks > 1 or where + _END64.size != at:
        _wrong(file, f"the zip64 record is said to be at {where}", at)
    found = _END64.unpack(file.read(where, _END64.size))
    magic, length, _, _, disk, first_disk, here, count, size, start = found
    if magic != b"PK\x06\x06" or length != _END64.size - 12 or disk or first_disk:
        _wrong(file, "the zip64 record is none, or has another length", where)
    return here, count, size, start, where


# -- one record ----------------------------------------------------------------------------------


def _entry(file: File, data: bytes, at: int, start: int) -> tuple[Record, int]:
    """The directory's entry at ``data[at]``, and where the next one begins."""
    if at + _ENTRY.size > len(data):
        _wrong(file, "the directory ends inside an entry", start + at)
    (magic, _, _, flags, method, _, _, crc, packed, size, names, extras, comment, disk, _, _,
     header) = _ENTRY.unpack_from(data, at)  # fmt: skip
    name_at = at + _ENTRY.size
    extra_at = name_at + names
    end = extra_at + extras + comment
    if magic != b"PK\x01\x02" or end > len(data) or disk not in (0, _U16):
        _wrong(file, "an entry of the directory is damaged", start + at)
    if names > MAX_NAME_BYTES or not names:
        _wrong(file, f"a record's name has {names} bytes", start + at)
    raw = data[name_at:extra_at]
    if _U32 in (size, packed, header):
        extra = data[extra_at : extra_at + extras]
        size, packed, header = _zip64(file, extra, (size, packed, header), start + at)
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError:
        _wrong(file, f"a record's name {raw[:40]!r} is not UTF-8", start + at)
    if header + _LOCAL.size > file.size or size > file.size:
        _wrong(
            file,
            f"record {name[:100]!r} is said to have {size} bytes from {header}; "
            f"the file has {file.size}",
            start + at,
        )
    return Record(name, raw, flags, method, size, packed, crc, header), end


def _zip64(file: File, extra: bytes, values: tuple[int, ...], at: int) -> list[int]:
    """The values with those that read ``0xffffffff`` taken from the zip64 field, in its order."""
    field, place = b"", 0
    while place + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, place)
        if kind == 1:
            field = extra[place + 4 : place + 4 + length]
            break
        place += 4 + length
    if len(field) < _LONG.size * values.count(_U32):
        _wrong(file, "a record's zip64 sizes are missing", at)
    longs = (found[0] for found in _LONG.iter_unpack(field[: len(field) // 8 * 8]))
    return [next(longs) if value == _U32 else value for value in values]


def _only_start(record: Record, following: int) -> int:
    """Where ``torch.save`` puts a record's data; 0 where the next header is not right behind."""
    start = record.header + _LOCAL.size + len(record.raw_name) + 4
    if record.size >= _U32 or record.header >= _U32:
        start += 4 + (16 if record.size >= _U32 else 0) + (8 if record.header >= _U32 else 0)
    start += -start % _ALIGN
    follows = following - start - record.size
    return start if record.flags & _SIZES_FOLLOW and follows in _DESCRIPTORS else 0


def _data_start(file: File, record: Record, directory: int) -> int:
    """Where a record's data begins, by its local header, which has to agree."""
    at, names = record.header, len(record.raw_name)
    if at + _LOCAL.size + names > directory:
        _wrong(file, f"the header of record {record.name!r} is not before the directory", at)
    data = file.read(at, _LOCAL.size + names)
    magic, _, flags, method, _, _, crc, packed, size, found, extras = _LOCAL.unpack_from(data)
    if magic != b"PK\x03\x04":
        _wrong(file, f"there is no record at {at}, where {record.name!r} should be", at)
    if found != names or data[_LOCAL.size :] != record.raw_name:
        other = file.read(at + _LOCAL.size, min(found, 100, directory - at - _LOCAL.size))
        _wrong(file, f"record {record.name!r} calls itself {other!r} in its own header", at)
    if flags != record.flags or method != record.method:
        _wrong(file, f"record {record.name!r} and its own header differ in kind", at)
    start: int = at + _LOCAL.size + names + extras
    if start > directory:
        _wrong(file, f"the header of record {record.name!r} runs into the directory", at)
    if _U32 in (size, packed):
        extra = file.read(start - extras, extras)
        size, packed, _ = _zip64(file, extra, (size, packed, 0), at)
    open_end = flags & _SIZES_FOLLOW and not (size or packed)
    if not open_end and (size, packed) != (record.size, record.packed):
        _wrong(file, f"record {record.name!r} has {record.size} bytes, or {size}", at)
    if crc != record.crc and not (open_end and not crc):
        _wrong(file, f"record {record.name!r} has two checksums", at)
    return start


def _wrong(file: File, problem: str, offset: int) -> NoReturn:
    hint = "it is no archive of torch.save, or it is damaged; download it again"
    raise refused("E_ZIP", file.name, problem, hint, offset=offset)
