"""Blocks: what an encoding is, and which of its bytes hold a region."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple, Protocol

import torch

from loadkit.tracing.storage import Operation
from loadkit.tracing.view import Inside, View, contiguous

__all__ = ["Blocks", "DecodeBlocks", "Encoding", "blocks_of"]


class Encoding(Protocol):
    """How blocks of the last dimension are stored."""

    @property
    def name(self) -> str:
        """The encoding's name, as its format calls it."""

    @property
    def block(self) -> int:
        """Elements of one block."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""

    def decode(self, packed: torch.Tensor) -> torch.Tensor:
        """uint8 [..., n * block_bytes] -> float32 [..., n * block]; any strides."""

    def decode_into(self, packed: torch.Tensor, out: torch.Tensor) -> object:
        """The same into ``out`` [..., n * block] of float32, bfloat16 or float16, rounded once."""


class DecodeBlocks:
    """The operation ``bytes -> numbers`` of one encoding."""

    tags: tuple[Any, ...] = ()

    def __init__(self, encoding: Encoding) -> None:
        self.encoding = encoding

    def __call__(self, packed: torch.Tensor) -> torch.Tensor:
        return self.encoding.decode(packed)

    def __repr__(self) -> str:
        return f"decode {self.encoding.name}"


class Blocks(NamedTuple):
    """The bytes that hold a region, and where the region lies in what they decode to."""

    source: View
    decoded: tuple[int, ...]
    shown: View
    aligned: bool


def blocks_of(op: Operation, region: Inside) -> Blocks:
    """The blocks that a region of a decoding needs; ``region`` relates it to ``op.view``."""
    encoding = op.func.encoding
    stored: View = op.args[0].view
    last = len(op.view.size) - 1
    starts = dict(region.starts)
    moved = [(j, d, step) for j, (d, step) in enumerate(region.dims) if d is not None and d != last]
    along = [(j, step) for j, (d, step) in enumerate(region.dims) if d == last]
    first = starts.get(last, 0)
    length = 1 + sum((region.size[j] - 1) * step for j, step in along)
    low = first // encoding.block
    high = -(-(first + length) // encoding.block)
    offset = stored.offset + low * encoding.block_bytes
    offset += sum(start * stored.stride[d] for d, start in region.starts if d != last)
    size = tuple(region.size[j] for j, _, _ in moved)
    stride = tuple(step * stored.stride[d] for _, d, step in moved)
    width = (high - low) * encoding.block_bytes
    source = View((*size, width), (*stride, 1), offset, 1)
    decoded = (*size, (high - low) * encoding.block)
    dense = contiguous(decoded, op.view.itemsize)
    shown = [0] * len(region.size)
    for place, (j, _, _) in enumerate(moved):
        shown[j] = dense.stride[place]
    for j, step in along:
        shown[j] = step
    view = View(region.size, tuple(shown), first - low * encoding.block, op.view.itemsize)
    aligned = view.offset == 0 and view.is_contiguous() and view.numel == prod(decoded)
    return Blocks(source, decoded, view, aligned)
