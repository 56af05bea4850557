"""Where the tensors of an index lie, held against each other and against the file's size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from loadkit.errors import FormatError, TruncatedError
from loadkit.file_checks import show
from loadkit_tensorizer.limits import MAX_META_BYTES

if TYPE_CHECKING:
    from loadkit.sources.base import File
    from loadkit_tensorizer.entries import Entry

__all__ = ["AGAIN", "check_layout", "truncated", "wrong"]

AGAIN = "the file is damaged: download or copy it again"
_META = 4  # the first version that has tensors without data
_MAX_HEADER = 1 << 18  # bytes of a tensor's header without what encryption adds
_LAST = 8  # zero bytes after the last tensor: a header of no length


def check_layout(file: File, version: int, begin: int, entries: Sequence[Entry]) -> None:
    """Tensors lie one behind the other, from the index to the end of the file.

    Args:
        file: the open file.
        version: of the format.
        begin: the byte after the index.
        entries: of the index, in its order.

    Raises:
        FormatError: E_LAYOUT, E_LIMIT or E_COUNT.
        TruncatedError: the file ends before the last of them.
    """
    at = begin
    meta = 0
    for entry in entries:
        problem = None
        if entry.offset != at:
            problem = f"begins at byte {entry.offset}; what is before it ends at {at}"
        elif not 8 < entry.start - entry.offset <= _most_header(entry):
            problem = f"has its data at byte {entry.start} and its header at {entry.offset}"
        elif entry.is_meta and version < _META:
            problem = f"has no data, which version {version} does not have"
        elif entry.nbytes != entry.full_bytes and not entry.is_meta:
            problem = f"has {entry.nbytes} bytes of data; its shape takes {entry.full_bytes}"
        if problem is not None:
            raise wrong(file, "E_LAYOUT", f"{show(entry.name)} {problem}", entry.offset, entry.name)
        meta += entry.full_bytes if entry.is_meta else 0
        if meta > MAX_META_BYTES:
            raise wrong(
                file,
                "E_LIMIT",
                f"{show(entry.name)} is a shape {list(entry.shape)} without data; all such "
                f"tensors of a file may have {MAX_META_BYTES} bytes of zeros",
                entry.offset,
                entry.name,
            )
        at = entry.end
    short = next((entry for entry in entries if entry.end > file.size), None)
    if short is not None:
        raise truncated(file, f"its data ends at byte {short.end}", short)
    rest = file.size - at
    known = rest and rest <= _LAST and file.local  # else nothing is read to see zeros
    if rest > _LAST or (known and file.read(at, rest).strip(b"\0")):
        raise wrong(
            file,
            "E_COUNT",
            f"{rest} bytes follow the last of the {len(entries)} tensors of the index",
            at,
        )


def wrong(file: File, code: str, said: str, offset: int, tensor: str | None = None) -> FormatError:
    """The error of a file that breaks a rule."""
    return FormatError(
        f"{show(file.name)}: {said}",
        code=code,
        file=file.name,
        tensor=tensor,
        offset=offset,
        hint=AGAIN,
    )


def _most_header(entry: Entry) -> int:
    """Encryption adds 16 bytes for each chunk of the data."""
    return _MAX_HEADER + entry.nbytes // 64


def truncated(file: File, said: str, entry: Entry | None) -> TruncatedError:
    """The error of a file that ends early."""
    subject = show(file.name) if entry is None else f"tensor {show(entry.name)}"
    return TruncatedError(
        f"{subject} is cut off: {said}, and {show(file.name)} has {file.size} bytes",
        file=file.name,
        tensor=None if entry is None else entry.name,
        offset=0 if entry is None else entry.start,
        detail={"size": file.size},
        hint="the download or copy is incomplete; fetch the file again",
    )
