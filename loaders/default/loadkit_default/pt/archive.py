"""One file of ``torch.save``: which container it is in, and what it holds."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from loadkit.file_checks import HEAD_BYTES, check_content, show
from loadkit.torch_archive.container import checksums_of, read_contents
from loadkit.torch_archive.errors import refused
from loadkit.torch_archive.tensors import Archive, place_tensors
from loadkit.torch_archive.zip_directory import Record, read_directory
from loadkit_default.pt.legacy import read_legacy
from loadkit_default.pt.state_dict import select

if TYPE_CHECKING:
    from loadkit.sources.base import File

__all__ = ["read_archive"]

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
    contents = read_contents(file, records, directory)
    big = contents.big
    told = {"format": "torch zip", "byteorder": "big" if big else "little"}
    selected = select(contents.value, file, weights_key)
    found = place_tensors(selected, file, contents.places, big=big, metadata=told)
    return replace(found, checksums=checksums_of(records.values()))


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
