"""One file of ``torch.save``: which container it is in, and what it holds."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from loadkit.file_checks import HEAD_BYTES, check_content, show
from loadkit_default.pt.errors import damaged, refused
from loadkit_default.pt.legacy import read_legacy
from loadkit_default.pt.machine import MAX_PICKLE_BYTES, Machine
from loadkit_default.pt.state_dict import Archive, place_tensors, select
from loadkit_default.pt.zip_directory import Record, check_records, read_directory

if TYPE_CHECKING:
    from loadkit.base_loader import Checksum
    from loadkit.sources.base import File

__all__ = ["read_archive"]

_PICKLE = "data.pkl"
# A pickle of protocol 0 that begins with an import: text, by its looks.
_TEXT_PICKLE = re.compile(rb"\(?c([\w.]{1,99})\n([\w.]{1,99})\n")
_TAR_MEMBERS = (b"sys_info\0", b"storages\0", b"tensors\0", b"pickle\0", b"./\0")


def read_archive(file: File, weights_key: str | None = None) -> Archive:
    """Read what a ``.bin``, ``.pt`` or ``.pth`` file says it holds; nothing in it is run.

    No byte of a tensor is read.

    Args:
        file: an open file.
        weights_key: the key of the state dict inside; see ``state_dict``.

    Raises:
        FormatError: E_FORMAT (another format), E_PICKLE (what is no state dict's pickle), E_ZIP,
            E_STRUCTURE, E_LAYOUT (a tensor and its storage), E_NAME, E_UNSUPPORTED
            (TorchScript, ``.pt2``, tar archives, tensors that are not plain).
        OptionError: there is nothing under ``weights_key``.
        ReadFailure: the file could not be read.
    """
    head = file.read(0, min(file.size, HEAD_BYTES))
    if head[257:262] == b"ustar" or head.startswith(_TAR_MEMBERS):
        raise _unsupported(file, "a tar archive, which torch wrote before version 0.1.10")
    if not head.startswith(b"PK"):
        _refuse_appended(file)
        found = _TEXT_PICKLE.match(head)
        if found is not None:
            name = b" ".join(found.groups()).decode("ascii")
            raise refused(
                "E_PICKLE",
                file.name,
                f"the pickle names {show(name)}, which is no part of a dict of tensors; nothing "
                "was imported or run",
                "do not load this file with anything that unpickles",
                offset=0,
                **{"global": name},
            )
    check_content(file, "torch", short_code="E_PICKLE")
    from loadkit.plan import collector_paused

    with collector_paused():
        if head.startswith(b"PK"):
            return _read_zip(file, weights_key)
        return read_legacy(file, weights_key)


def _refuse_appended(file: File) -> None:
    """A zip archive behind something else is two files in one: it is not known which counts."""
    if file.size >= 22 and file.read(file.size - 22, 4) == b"PK\x05\x06":
        raise refused(
            "E_ZIP",
            file.name,
            "a zip archive is appended to other content",
            "it is not known which of the two counts; download the file from its origin",
            offset=0,
        )


def _read_zip(file: File, weights_key: str | None) -> Archive:
    records, directory = read_directory(file)
    _refuse_other_kinds(file, records)
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
    told = {"format": "torch zip", "byteorder": "big" if big else "little"}
    found = place_tensors(select(value, file, weights_key), file, places, big=big, metadata=told)
    return replace(found, checksums=_checksums(records))


def _checksums(records: dict[str, Record]) -> tuple[Checksum, ...]:
    """Every record's CRC-32, in file order; 0 is what a writer that computes none leaves."""
    kept = (each for each in records.values() if each.size)
    return tuple(
        (each.start, each.start + each.size, f"{each.crc:08x}" if each.crc else None)
        for each in sorted(kept, key=lambda each: each.start)
    )


def _refuse_other_kinds(file: File, records: dict[str, Record]) -> None:
    """TorchScript and exported programs are programs, not state dicts."""
    names = {name.partition("/")[2] or name for name in records} | set(records)
    if "constants.pkl" in names or any(name.startswith("code/") for name in names):
        raise _unsupported(
            file,
            "a TorchScript program",
            "in torch: torch.save(torch.jit.load(path).state_dict(), ...)",
        )
    if names & {"archive_format", "serialized_exported_program.json"} or any(
        name.startswith("models/") and name.endswith(".json") for name in names
    ):
        raise _unsupported(
            file,
            "an exported program (.pt2)",
            "in torch: torch.save(torch.export.load(path).state_dict, ...)",
        )


def _unsupported(file: File, what: str, how: str | None = None) -> Exception:
    return refused(
        "E_UNSUPPORTED",
        file.name,
        f"this is {what}, not a saved state dict",
        how or "load it with an old torch and save its state dict again",
        offset=0,
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
