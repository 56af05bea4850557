"""Writing a safetensors file: the header first, then each tensor's bytes as they come.

Nothing is gathered: a tensor of the host's memory that lies in one piece is handed to the operating
system as it is, any other goes through blocks of at most ``BLOCK`` bytes.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch

from loadkit.errors import ModelError, OptionError
from loadkit.file_checks import show
from loadkit.safetensors_format import (
    MAX_DIMS,
    MAX_HEADER_BYTES,
    MAX_METADATA,
    MAX_NAME_BYTES,
    MAX_TENSORS,
)
from loadkit.tensor_info import DTYPES

__all__ = [
    "BLOCK",
    "Entry",
    "FileLayout",
    "Sink",
    "blocks_of",
    "check_metadata",
    "check_name",
    "entry_of",
    "lay_out_file",
    "write_safetensors",
]

BLOCK = 8 << 20  # bytes of a tensor that are copied at once, where copying cannot be avoided

Blocks = Iterator["memoryview | bytes"]


class Sink(Protocol):
    """Where a file's bytes go; ``tensor`` is whose they are, for errors."""

    def write(self, data: memoryview | bytes, tensor: str | None = None) -> None:
        """Take all of ``data``."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor to write: ``dtype`` a name of ``DTYPES``, ``shape`` in elements.

    ``blocks()`` gives its ``nbytes`` bytes, row-major, in order; it is called once.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    blocks: Callable[[], Blocks]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * DTYPES[self.dtype][0] // 8


def entry_of(name: str, tensor: torch.Tensor) -> Entry:
    """A tensor in memory, as an entry.

    Raises:
        ModelError: E_NAME or E_SHAPE, no reader would take it back; E_DTYPE, safetensors has no
            such dtype, or the tensor is sparse or quantised.
    """
    check_name(name)
    kind = _names().get(tensor.dtype)
    if kind is None or tensor.layout is not torch.strided:
        raise ModelError(
            f"tensor {show(name)} is {tensor.dtype}, {tensor.layout}: safetensors cannot hold that",
            code="E_DTYPE",
            tensor=name,
        )
    if tensor.dim() > MAX_DIMS:
        raise ModelError(
            f"tensor {show(name)} has {tensor.dim()} dims; the limit is {MAX_DIMS}",
            code="E_SHAPE",
            tensor=name,
        )
    shape = tuple(tensor.shape)
    if DTYPES[kind][0] == 4:  # torch counts pairs
        shape = (*shape[:-1], shape[-1] * 2)
    return Entry(name, kind, shape, lambda: blocks_of(tensor))


def check_name(name: str) -> None:
    """Refuse a tensor name that loadkit would refuse to read.

    Raises:
        ModelError: E_NAME.
    """
    size = len(name.encode("utf-8", "surrogatepass"))
    problem = None
    if not name or name == "__metadata__":
        problem = "is no name for a tensor"
    elif size > MAX_NAME_BYTES:
        problem = f"is {size} bytes long; the limit is {MAX_NAME_BYTES}"
    elif any(unicodedata.category(char) in ("Cc", "Cs") for char in name):
        problem = "holds control characters or halves of surrogate pairs"
    if problem is not None:
        message = f"the name {show(name)} {problem}"
        raise ModelError(message, code="E_NAME", tensor=name[:MAX_NAME_BYTES])


def check_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """A file's ``__metadata__``: the caller's strings, and ``format: pt``.

    Raises:
        OptionError: not strings, too many, or another ``format``.
    """
    values: list[object] = [*metadata.keys(), *metadata.values()]
    good = all(isinstance(value, str) for value in values)
    if not good or len(metadata) >= MAX_METADATA or metadata.get("format", "pt") != "pt":
        raise OptionError(
            f"metadata has to be fewer than {MAX_METADATA} strings by name, 'format' not among "
            "them or 'pt'"
        )
    return {"format": "pt", **metadata}


def write_safetensors(out: Sink, entries: Sequence[Entry], metadata: Mapping[str, str]) -> int:
    """Write one file; returns the bytes of its tensors.

    Raises:
        ModelError: E_HEADER, more tensors or a longer header than a file can have; E_LAYOUT, an
            entry gave other bytes than it said.
        OSError: whatever ``out`` raises.
    """
    layout = lay_out_file(entries, metadata)
    out.write(layout.head)
    for entry in layout.entries:
        written = 0
        for block in entry.blocks():
            written += len(block)
            out.write(block, entry.name)
        if written != entry.nbytes:
            raise ModelError(
                f"tensor {show(entry.name)} gave {written} bytes, not {entry.nbytes}",
                code="E_LAYOUT",
                tensor=entry.name,
            )
    return layout.size - len(layout.head)


@dataclass(frozen=True, slots=True)
class FileLayout:
    """One file before it is written: what it begins with, and its tensors in their order.

    ``head`` is the header with its length; ``size`` the file's, in bytes. The tensors follow the
    head without gaps.
    """

    head: bytes
    entries: tuple[Entry, ...]
    size: int


def lay_out_file(entries: Sequence[Entry], metadata: Mapping[str, str]) -> FileLayout:
    """Where everything of a file goes.

    The data begins at a multiple of 8 bytes. In it the widest dtypes come first, so that every
    tensor is aligned to its elements; otherwise the order stays.

    Raises:
        ModelError: E_HEADER, more tensors or a longer header than a file can have.
    """
    ordered = tuple(sorted(entries, key=lambda entry: -DTYPES[entry.dtype][0]))
    values: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for entry in ordered:
        start, end = end, end + entry.nbytes
        values[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
    body = json.dumps(values, separators=(",", ":"), ensure_ascii=False).encode()
    body += b" " * (-len(body) % 8)
    if len(entries) > MAX_TENSORS or len(body) > MAX_HEADER_BYTES:
        raise ModelError(
            f"{len(entries)} tensors with a header of {len(body)} bytes are too many for one file",
            code="E_HEADER",
            hint="give a smaller max_shard_bytes",
        )
    return FileLayout(len(body).to_bytes(8, "little") + body, ordered, 8 + len(body) + end)


def blocks_of(tensor: torch.Tensor) -> Blocks:
    """A tensor's bytes, row-major: views of host memory where that is possible."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        flat = tensor.view(-1).view(torch.uint8)
        if flat.device.type == "cpu":
            yield flat.numpy().data
            return
        for start in range(0, flat.numel(), BLOCK):
            yield flat[start : start + BLOCK].cpu().numpy().data
        return
    dim = next((d for d, n in enumerate(tensor.shape) if n > 1), 0)
    if tensor.nbytes <= BLOCK:
        yield from blocks_of(tensor.contiguous())
        return
    rows = max(1, tensor.shape[dim] * BLOCK // tensor.nbytes)
    for start in range(0, tensor.shape[dim], rows):
        count = min(rows, tensor.shape[dim] - start)
        yield from blocks_of(tensor.narrow(dim, start, count))


@cache
def _names() -> dict[torch.dtype, str]:
    """The safetensors name of each dtype that this torch has."""
    found = {name: getattr(torch, attribute, None) for name, (_, attribute) in DTYPES.items()}
    return {dtype: name for name, dtype in found.items() if isinstance(dtype, torch.dtype)}
