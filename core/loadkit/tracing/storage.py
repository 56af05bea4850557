"""A storage, its ordered writes, and a value: what a view of it held at one moment.

Parameters, scratch buffers, tensors of a file and results of operations are all one thing here:
a storage with a *base* (what it held first) and a list of writes. A value names a storage, how
many of its writes had happened, and a view. Values never change, so the recorded program may be
executed in any order that suits the file.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from loadkit.tensor_info import TensorInfo, torch_dtype
from loadkit.tracing.view import View, contiguous

__all__ = [
    "PARAMETER",
    "Base",
    "Constant",
    "FileLeaf",
    "Fill",
    "GeneratedLeaf",
    "Operation",
    "Storage",
    "Unwritten",
    "Value",
    "Write",
    "moment",
    "values_of",
]


# There is one FileLeaf, Value, Write and Src for each tensor at least, and a frozen one takes twice
# as long to make: they are not frozen, and nobody changes them.


@dataclass(slots=True, unsafe_hash=True)
class FileLeaf:
    """A checkpoint tensor's bytes in a file."""

    info: TensorInfo
    name: str
    size: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class GeneratedLeaf:
    """A tensor made by a formula: ``make(view) -> tensor`` gives any strided part of it."""

    name: str
    size: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[View], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Constant:
    """Real elements: ``flat`` is 1-d over the whole storage. ``source`` names the checkpoint
    tensor that they came from in real form (an opaque row), or is None for plain constants.
    """

    flat: torch.Tensor
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Fill:
    """Every element is ``value``, stored as ``dtype``."""

    value: Any
    dtype: torch.dtype


PARAMETER = "a parameter"  # what unwritten memory on meta is called


@dataclass(frozen=True, slots=True)
class Unwritten:
    """No element has been given a value yet."""

    what: str


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """A deferred call; tensors in ``args`` and ``kwargs`` are Values or real tensors.

    ``output`` picks one of several results. ``view`` is the result's layout in its storage.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: int | None
    view: View
    dtype: torch.dtype

    def inputs(self) -> Iterator[Value]:
        """The values it reads."""
        return values_of((self.args, self.kwargs))


Base = FileLeaf | GeneratedLeaf | Constant | Fill | Unwritten | Operation


@dataclass(slots=True, eq=False)
class Storage:
    """What memory holds over time. ``keep`` holds the real storage, so its id is not re-used."""

    base: Base
    numel: int
    itemsize: int
    writes: list[Write] = field(default_factory=list)
    loaded_from: int = 0  # writes before this one are a constructor's: they cover nothing
    keep: Any = None
    real: torch.Tensor | None = None  # flat real memory behind it (a buffer, a live module)
    scratch: bool = False
    layers: Any = None  # its writes by place (tracing.layers)

    @staticmethod
    def of_info(info: TensorInfo) -> Storage:
        """The storage of one checkpoint tensor."""
        dtype = torch_dtype(info.dtype)
        leaf = FileLeaf(info, info.name, info.shape, dtype)
        return Storage.of_leaf(leaf)

    @staticmethod
    def of_leaf(leaf: FileLeaf | GeneratedLeaf) -> Storage:
        """The storage of a leaf, row-major."""
        view = contiguous(leaf.size, leaf.dtype.itemsize)
        return Storage(leaf, view.numel, leaf.dtype.itemsize)


@dataclass(slots=True, eq=False)
class Value:
    """What ``view`` of ``storage`` held after its first ``version`` writes, as ``dtype``."""

    storage: Storage
    version: int
    view: View
    dtype: torch.dtype


_sequence = itertools.count()


def moment() -> int:
    """A number between those of the writes before and after."""
    return next(_sequence)


@dataclass(slots=True, eq=False)
class Write:
    """``value`` (of the view's size) was copied, cast to ``dtype``, into ``view``.

    ``mask`` restricts it: the elements (flat bool over the view) that were really written. ``seq``
    is the global order.
    """

    view: View
    dtype: torch.dtype
    value: Value | Fill
    mask: torch.Tensor | None = None
    seq: int = field(default_factory=lambda: next(_sequence))


def values_of(tree: Any) -> Iterator[Value]:
    """Every Value inside nested tuples, lists and dicts."""
    if isinstance(tree, Value):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from values_of(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from values_of(item)
