"""``weights.json``: name -> dtype, shape and offset of every tensor in ``weights.raw``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from loadkit.errors import FormatError
from loadkit.file_checks import show
from loadkit.json_safe import parse_json
from loadkit.sources.base import File
from loadkit.tensor_info import DTYPES, TensorInfo

__all__ = ["DATA", "TABLE", "read_table"]

TABLE, DATA = "weights.json", "weights.raw"
MAX_TABLE = 64 << 20  # bytes


def read_table(table: File, data: File) -> list[TensorInfo]:
    """Every tensor, in the order of the data.

    Raises:
        FormatError: E_JSON, E_FIELD, E_LAYOUT: the table is broken, or the data is not what it
            says; names the file, the tensor and the offset, and says what to do.
    """
    content = table.read(0, min(table.size, MAX_TABLE + 1))
    values = parse_json(content, file=table.name, max_bytes=MAX_TABLE)
    if not isinstance(values, dict):
        raise FormatError(f"{show(table.name)} holds no object", code="E_FIELD", file=table.name)
    found = [_entry(name, entry, table, data) for name, entry in values.items()]
    found.sort(key=lambda info: info.offset)
    for before, info in _neighbours(found):
        if info.offset < before.offset + before.nbytes:
            raise _wrong(info, f"overlaps tensor {show(before.name)}")
    for info in found:
        if info.offset + info.nbytes > data.size:
            raise _wrong(info, f"ends at byte {info.offset + info.nbytes} of {data.size}")
    return found


def _entry(name: str, entry: Any, table: File, data: File) -> TensorInfo:
    given = entry if isinstance(entry, dict) else {}
    dtype, shape = given.get("dtype"), given.get("shape")
    numbers: list[Any] = [*shape, given.get("offset")] if isinstance(shape, list) else [None]
    if dtype not in DTYPES or not all(type(n) is int and 0 <= n < 1 << 48 for n in numbers):
        raise FormatError(
            f"tensor {show(name)} of {show(table.name)} needs a dtype of {', '.join(DTYPES)}, a "
            "shape of whole numbers and an offset",
            code="E_FIELD",
            file=table.name,
            tensor=name,
            hint="write the table again",
        )
    *size, offset = numbers
    nbytes = math.prod(size) * DTYPES[dtype][0] // 8
    return TensorInfo(name, data, offset, nbytes, tuple(size), dtype)


def _neighbours(found: list[TensorInfo]) -> Iterator[tuple[TensorInfo, TensorInfo]]:
    return zip(found, found[1:], strict=False)


def _wrong(info: TensorInfo, what: str) -> FormatError:
    return FormatError(
        f"tensor {show(info.name)} {what} in {show(info.file.name)}",
        code="E_LAYOUT",
        file=info.file.name,
        tensor=info.name,
        offset=info.offset,
        hint="the file is truncated or of another save; copy it again",
    )
