"""The tensors of a GGUF header: names, dims, types and offsets, held against the file's size."""

from __future__ import annotations

import logging
import math
import struct
import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from loadkit.file_checks import show
from loadkit.tensor_info import TensorInfo
from loadkit_gguf.ggml_types import GGML_TYPES, REMOVED_TYPES, GGMLType

if TYPE_CHECKING:
    from loadkit.sources.base import File
    from loadkit_gguf.window import Window

__all__ = ["MAX_DIM", "MAX_DIMS", "MAX_NAME_BYTES", "GGUFTensor", "read_tensors"]

log = logging.getLogger("loadkit")

MAX_NAME_BYTES = 1024
LONG_NAME_BYTES = 64  # ggml itself holds 63
MAX_DIMS = 4
MAX_DIM = 2**48  # elements along one dim, also where the product is 0
MAX_BYTES = 2**63 - 1  # of one tensor

_ENTRY = [struct.Struct(f"<{dims}QIQ") for dims in range(MAX_DIMS + 1)]


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor.

    Attributes:
        name: as the file has it.
        file: the file it lies in.
        kind: its ggml type.
        shape: as torch counts, the last dim running fastest (files state dims the other way).
        offset: of its first byte in the file.
        nbytes: its bytes, without padding.
    """

    name: str
    file: File
    kind: GGMLType
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def dtype(self) -> str:
        """The name of its type."""
        return self.kind.name

    def info(self) -> TensorInfo:
        """Where it lies: of its own dtype, or for blocks U8 of shape (*rows, bytes of a row)."""
        if self.kind.dtype is not None:
            return TensorInfo(
                self.name, self.file, self.offset, self.nbytes, self.shape, self.kind.dtype
            )
        row = self.shape[-1] // self.kind.block * self.kind.block_bytes
        shape = (*self.shape[:-1], row)
        return TensorInfo(self.name, self.file, self.offset, self.nbytes, shape, "U8")


def read_tensors(window: Window, count: int, alignment: int) -> tuple[tuple[GGUFTensor, ...], int]:
    """Every tensor's entry, checked; and where the data begins.

    Raises:
        FormatError: E_STRING, E_NAME, E_DUPLICATE, E_SHAPE, E_DTYPE, E_LAYOUT, E_HEADER.
    """
    entries: list[tuple[str, GGMLType, tuple[int, ...], int, int]] = []
    names: set[str] = set()
    for _ in range(count):
        at = window.pos
        name = _name(window, at)
        if name in names:
            window.fail("E_DUPLICATE", f"there are two tensors {show(name)}", at, tensor=name)
        names.add(name)
        dims = window.u32("a tensor's entry")
        if dims > MAX_DIMS:
            message = f"tensor {show(name)} has {dims} dims; the limit is {MAX_DIMS}"
            window.fail("E_SHAPE", message, at, tensor=name)
        form = _ENTRY[dims]
        start = window.need(form.size, "E_HEADER", "a tensor's entry")
        *shape, kind, offset = form.unpack_from(window.data, start)
        window.pos += form.size
        shape.reverse()
        found, nbytes = _size(window, at, name, tuple(shape), kind)
        entries.append((name, found, tuple(shape), offset, nbytes))
    base = window.pos + -window.pos % alignment
    return _placed(window, entries, base, alignment), base


def _name(window: Window, at: int) -> str:
    raw = window.string("a tensor's name", MAX_NAME_BYTES, "E_NAME")
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError:
        window.fail("E_NAME", f"a tensor's name {show(raw[:100])} is not UTF-8", at)
    if not name:
        window.fail("E_NAME", "a tensor's name is empty", at)
    if not name.isprintable() and any(unicodedata.category(char) == "Cc" for char in name):
        window.fail("E_NAME", f"tensor name {show(name)} holds control characters", at, tensor=name)
    if len(raw) >= LONG_NAME_BYTES:
        log.warning(
            "%s: tensor name %s has %d bytes; llama.cpp takes %d",
            show(window.file.name),
            show(name),
            len(raw),
            LONG_NAME_BYTES - 1,
        )
    return name


def _size(
    window: Window, at: int, name: str, shape: tuple[int, ...], number: int
) -> tuple[GGMLType, int]:
    """The type behind a number, and the tensor's bytes."""
    kind = GGML_TYPES.get(number)
    if kind is None:
        _unknown_type(window, at, name, number)
    row = shape[-1] if shape else 1
    nbytes = math.prod(shape) // kind.block * kind.block_bytes
    if shape and max(shape) > MAX_DIM:
        problem = f"the limit of a dim is {MAX_DIM}"
    elif row % kind.block:
        problem = f"its rows are no whole number of blocks of {kind.block}"
    elif nbytes > MAX_BYTES:
        problem = f"it would take {nbytes} bytes"
    else:
        return kind, nbytes
    what = f"tensor {show(name)} of {kind.name} {list(shape)}"
    detail = {"shape": list(shape), "block": kind.block}
    return window.fail("E_SHAPE", f"{what}: {problem}", at, tensor=name, detail=detail)


def _unknown_type(window: Window, at: int, name: str, number: int) -> NoReturn:
    if number in REMOVED_TYPES:
        message = f"{REMOVED_TYPES[number]}, which ggml removed"
        hint = "quantise the model again from its float weights"
    else:
        known = f"loadkit-gguf {_version()} knows types up to {max(GGML_TYPES)}"
        message = f"unknown; {known}"
        hint = "it may be newer: upgrade gguf support, pip install --upgrade loadkit-gguf"
    window.fail(
        "E_DTYPE",
        f"tensor {show(name)} is of type {number}: {message}",
        at,
        tensor=name,
        detail={"type": number},
        hint=hint,
    )


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("loadkit-gguf")
    except PackageNotFoundError:
        return "of this checkout"


def _placed(
    window: Window,
    entries: list[tuple[str, GGMLType, tuple[int, ...], int, int]],
    base: int,
    alignment: int,
) -> tuple[GGUFTensor, ...]:
    """The tensors where they lie: one after another from ``base``, padded, to the file's end."""
    file, expected, end = window.file, 0, 0
    room = file.size - base
    placed: list[GGUFTensor] = []
    for name, kind, shape, offset, nbytes in entries:
        if offset != expected:
            what = "overlaps what is before it" if offset < expected else "leaves a hole"
            _bad_layout(window, f"tensor {show(name)} {what}", name, base + expected, base + offset)
        if nbytes > room - offset:
            what = f"tensor {show(name)} passes the file's end"
            _bad_layout(window, what, name, base + offset + nbytes, file.size)
        placed.append(GGUFTensor(name, file, kind, shape, base + offset, nbytes))
        end = offset + nbytes
        expected = end + -end % alignment
    if room > max(expected, 0):
        message = f"{room - expected} bytes follow that belong to no tensor"
        _bad_layout(window, message, entries[-1][0] if entries else None, base + end, file.size)
    return tuple(placed)


def _bad_layout(window: Window, what: str, tensor: str | None, expected: int, actual: int) -> None:
    window.fail(
        "E_LAYOUT",
        f"{what}: expected byte {expected}, found {actual}",
        min(expected, actual),
        tensor=tensor,
        detail={"expected": expected, "actual": actual},
        hint="the file is truncated or damaged; copy or download it again",
    )
