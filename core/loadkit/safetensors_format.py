"""Reading a safetensors header: what lies where, every rule of the format checked.

Format: 8 bytes little-endian length n, n bytes of JSON that start with ``{`` and may be padded with
spaces, then the data, which the tensors cover without hole or overlap. The limits below are part
of what loadkit promises; a file beyond them is refused, never half read.

Source: the safetensors format description, and what its library (0.8) accepts.
"""

from __future__ import annotations

import logging
import math
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from loadkit.errors import FormatError
from loadkit.file_checks import check_content, show
from loadkit.safetensors_scan import ENTRY, RawEntry, Scanner
from loadkit.tensor_info import DTYPES, TensorInfo

if TYPE_CHECKING:
    from loadkit.sources.base import File

__all__ = [
    "MAX_DIM",
    "MAX_DIMS",
    "MAX_HEADER_BYTES",
    "MAX_METADATA",
    "MAX_NAME_BYTES",
    "MAX_TENSORS",
    "SafetensorsHeader",
    "read_header",
]

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 100_000_000
MAX_NAME_BYTES = 1024
MAX_DIMS = 8
MAX_DIM = 2**48  # elements along one dim, also where the product is 0
MAX_TENSORS = 1_000_000
MAX_METADATA = 10_000  # keys of __metadata__
MAX_BYTES = 2**63 - 1  # of one tensor


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """One file's header.

    Attributes:
        file: the file it was read from.
        metadata: ``__metadata__``, empty if absent.
        tensors: in file order; offsets count from the file's first byte.
        header_bytes: length of the JSON; the data starts 8 bytes later than this.
    """

    file: File
    metadata: Mapping[str, str]
    tensors: tuple[TensorInfo, ...]
    header_bytes: int


def read_header(file: File) -> SafetensorsHeader:
    """Read and check a safetensors file's header; no byte of the data is read.

    Takes time linear in the header and at most 8 times its size in memory.

    Raises:
        FormatError: with the code of the rule that was broken: E_FORMAT (another format's
            content), E_HEADER (length), E_UTF8, E_JSON, E_DUPLICATE, E_FIELD, E_NAME, E_DTYPE,
            E_SHAPE, E_LAYOUT, E_METADATA.
        ReadFailure: the file could not be read.
    """
    check_content(file, "safetensors")
    header_bytes = _header_length(file)
    text = _header_text(file, header_bytes)
    if text.count('"data_offsets"') > MAX_TENSORS:
        raise _too_many(file)
    metadata, tensors = _entries(file, text, 8 + header_bytes)
    return SafetensorsHeader(
        file, metadata, _in_file_order(file, tensors, 8 + header_bytes), header_bytes
    )


def _header_length(file: File) -> int:
    """The header's length in bytes, checked against the limits and the file."""
    length = int.from_bytes(file.read(0, 8), "little")
    room = file.size - 8
    if length < 2:
        problem = f"claims a header of {length} bytes; the least is 2"
    elif length > MAX_HEADER_BYTES:
        problem = f"claims a header of {length} bytes; the limit is {MAX_HEADER_BYTES}"
    elif length > room:
        problem = f"claims a header of {length} bytes and holds {room} after the length"
    else:
        return length
    raise FormatError(
        f"{show(file.name)} {problem}",
        code="E_HEADER",
        file=file.name,
        offset=0,
        detail={"expected": f"2..{min(room, MAX_HEADER_BYTES)}", "actual": length},
        hint="it is no safetensors file, or its start is damaged; download it again",
    )


def _header_text(file: File, length: int) -> str:
    try:
        return file.read(8, length).decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(
            f"the header of {show(file.name)} is not UTF-8 at byte {8 + error.start}",
            code="E_UTF8",
            file=file.name,
            offset=8 + error.start,
        ) from None


def _entries(file: File, text: str, base: int) -> tuple[dict[str, str], list[TensorInfo]]:
    """Every entry of the header in its own order. ``base``: where the data starts."""
    scan = Scanner(text, file.name)
    metadata: dict[str, str] | None = None
    tensors: list[TensorInfo] = []
    names: set[str] = set()
    shapes: dict[str, tuple[tuple[int, ...], int]] = {}
    match_entry = ENTRY.match
    mark, pos = scan.expect(0, "{")
    if text[pos : pos + 1] == "}":
        mark, pos = scan.expect(pos, "}")
    while mark != "}":
        at = pos
        match = match_entry(text, pos)
        name = match[1] if match else ""
        if match and name != "__metadata__" and name.isascii():
            _, dtype, shape_text, first, last, mark = match.groups()
            start, end = int(first), int(last)
            pos = match.end()
            known = shapes.get(shape_text)
            if known is None:
                shape = tuple(map(int, shape_text.split(","))) if shape_text else ()
                known = shape, _elements(scan, at, name, shape)
                if len(shapes) < 4096:  # as few as a model has; never as many as a file likes
                    shapes[shape_text] = known
            shape, elements = known
        else:
            name, pos = scan.string(pos, "a tensor's name", "E_JSON")
            _, pos = scan.expect(pos, ":")
            if name == "__metadata__":
                if metadata is not None:
                    scan.fail("E_DUPLICATE", "the header has two __metadata__", at)
                metadata, pos = scan.metadata(pos, MAX_METADATA)
                mark, pos = scan.expect(pos, ",}")
                continue
            _check_name(scan, at, name)
            (dtype, shape, start, end), pos = scan.entry(pos, name, MAX_DIMS)
            elements = _elements(scan, at, name, shape)
            mark, pos = scan.expect(pos, ",}")
        bits = DTYPES[dtype][0] if dtype in DTYPES else 0
        if end - start < 0 or elements * bits != (end - start) * 8 or not bits or bits == 4:
            _check_size(scan, at, name, RawEntry(dtype, shape, start, end), elements)
        if name in names:
            scan.fail("E_DUPLICATE", f"the header has two tensors {show(name)}", at, tensor=name)
        names.add(name)
        if len(names) > MAX_TENSORS:
            raise _too_many(file)
        tensors.append(TensorInfo(name, file, base + start, end - start, shape, dtype))
    if pos != len(text):
        scan.broken(pos, "nothing but white space after the last '}'")
    if not text.isascii() or "\\u" in text:
        _warn_lookalikes(file, names)
    return metadata or {}, tensors


def _check_name(scan: Scanner, at: int, name: str) -> None:
    size = len(name.encode("utf-8"))
    if not name:
        scan.fail("E_NAME", "a tensor's name is empty", at, tensor=name)
    if size > MAX_NAME_BYTES:
        problem = f"is {size} bytes long; the limit is {MAX_NAME_BYTES}"
        scan.fail("E_NAME", f"a tensor's name {show(name)} {problem}", at, tensor=name[:100])
    if any(unicodedata.category(char) == "Cc" for char in name):
        scan.fail("E_NAME", f"tensor name {show(name)} holds control characters", at, tensor=name)


def _elements(scan: Scanner, at: int, name: str, shape: tuple[int, ...]) -> int:
    """The number of elements, every dim checked on its own first."""
    if len(shape) > MAX_DIMS:
        problem = f"has {len(shape)} dims; the limit is {MAX_DIMS}"
        scan.fail("E_SHAPE", f"tensor {show(name)} {problem}", at, tensor=name)
    if any(dim > MAX_DIM for dim in shape):
        problem = f"has shape {list(shape)}; the limit of a dim is {MAX_DIM}"
        scan.fail("E_SHAPE", f"tensor {show(name)} {problem}", at, tensor=name)
    elements = math.prod(shape)
    if elements > MAX_BYTES:
        problem = f"has shape {list(shape)}: {elements} elements; the limit is {MAX_BYTES} bytes"
        scan.fail("E_SHAPE", f"tensor {show(name)} {problem}", at, tensor=name)
    return elements


def _check_size(scan: Scanner, at: int, name: str, raw: RawEntry, elements: int) -> None:
    """The dtype is known, and the bytes are those of the shape."""
    if raw.dtype not in DTYPES:
        known = " ".join(sorted(DTYPES))
        hint = f"known dtypes: {known}"
        message = f"tensor {show(name)} has an unknown dtype {show(raw.dtype)}"
        scan.fail("E_DTYPE", message, at, tensor=name, hint=hint)
    bits = DTYPES[raw.dtype][0]
    if raw.end < raw.start:
        message = f"tensor {show(name)} ends at {raw.end}, before its start {raw.start}"
        scan.fail("E_LAYOUT", message, at, tensor=name)
    what = f"tensor {show(name)} is {raw.dtype} {list(raw.shape)}"
    if bits < 8 and (not raw.shape or raw.shape[-1] * bits % 8):
        scan.fail("E_LAYOUT", f"{what}: its last dim does not fill whole bytes", at, tensor=name)
    if elements * bits != (raw.end - raw.start) * 8:
        message = f"{what}, {elements * bits // 8} bytes, and has {raw.end - raw.start} of the data"
        scan.fail("E_LAYOUT", message, at, tensor=name)


def _in_file_order(file: File, tensors: list[TensorInfo], base: int) -> tuple[TensorInfo, ...]:
    """The tensors by offset; they must cover the data exactly.

    A tensor of no bytes may share its offset with the next one.
    """
    tensors.sort(key=attrgetter("offset", "nbytes"))
    expected = base
    for info in tensors:
        if info.offset != expected:
            kind = "overlaps the tensor before it" if info.offset < expected else "leaves a hole"
            raise _layout(
                file, f"tensor {show(info.name)} {kind}", info.name, expected, info.offset
            )
        expected += info.nbytes
    if expected != file.size:
        short = file.size < expected
        what = "the file is cut short" if short else "bytes follow that belong to no tensor"
        last = tensors[-1].name if tensors else None
        raise _layout(file, what, last, expected, file.size)
    return tuple(tensors)


def _layout(file: File, what: str, tensor: str | None, expected: int, actual: int) -> FormatError:
    return FormatError(
        f"{show(file.name)}: {what}: expected byte {expected}, found {actual}",
        code="E_LAYOUT",
        file=file.name,
        tensor=tensor,
        offset=min(expected, actual),
        detail={"expected": expected, "actual": actual},
        hint="the file is damaged or incomplete; copy or download it again",
    )


def _too_many(file: File) -> FormatError:
    return FormatError(
        f"{show(file.name)} holds more than {MAX_TENSORS} tensors", code="E_HEADER", file=file.name
    )


def _warn_lookalikes(file: File, names: set[str]) -> None:
    """Warn of names that differ only in how their letters are composed (NFC)."""
    seen: dict[str, str] = {}
    for name in names:
        if name.isascii():
            continue
        other = seen.setdefault(unicodedata.normalize("NFC", name), name)
        if other != name:
            logger.warning(
                "%s: tensors %s and %s look the same and are two (Unicode normalisation)",
                show(file.name),
                ascii(name),
                ascii(other),
            )
