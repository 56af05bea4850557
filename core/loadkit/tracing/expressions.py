"""What a value is made of: regions of leaves, and what is done with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from loadkit.tracing.storage import FileLeaf, GeneratedLeaf, Operation, Storage
from loadkit.tracing.view import View

__all__ = [
    "Call",
    "Const",
    "Expr",
    "Filled",
    "Missing",
    "Part",
    "Pieces",
    "Replay",
    "Src",
    "as_dtype",
    "cast",
    "exprs_in",
    "reshaped",
]


@dataclass(slots=True, unsafe_hash=True)  # not frozen: see FileLeaf
class Src:
    """A region of a leaf; ``view`` walks its row-major elements, ``dtype`` re-reads the bits."""

    leaf: FileLeaf | GeneratedLeaf
    view: View
    dtype: torch.dtype

    @property
    def size(self) -> tuple[int, ...]:
        return self.view.size


@dataclass(frozen=True, slots=True)
class Filled:
    """One value, everywhere."""

    value: Any
    size: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Const:
    """A real tensor; ``source`` as in ``Constant``."""

    tensor: torch.Tensor
    source: str | None

    @property
    def size(self) -> tuple[int, ...]:
        return tuple(self.tensor.size())

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype


@dataclass(frozen=True, slots=True)
class Call:
    """``func(*args, **kwargs)[output]``; tensors among the arguments are expressions or real.

    ``pointwise`` says that a part of it is the same call on parts of the arguments; ``origin`` is
    the operation if all of it is asked for, so that several parts share one result.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: int | None
    size: tuple[int, ...]
    dtype: torch.dtype
    pointwise: bool
    origin: Operation | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """``view`` of the storage that a whole call's result lies in."""

    call: Call
    view: View
    dtype: torch.dtype

    @property
    def size(self) -> tuple[int, ...]:
        return self.view.size


@dataclass(frozen=True, slots=True)
class Pieces:
    """A tensor put together: each expression lands in its view of the row-major whole."""

    parts: tuple[tuple[View, Expr], ...]
    size: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Replay:
    """``view`` of a storage that is built up in memory, write by write."""

    storage: Storage
    version: int
    view: View
    dtype: torch.dtype

    @property
    def size(self) -> tuple[int, ...]:
        return self.view.size


@dataclass(frozen=True, slots=True)
class Missing:
    """Nothing was ever written here."""

    what: str
    size: tuple[int, ...]
    dtype: torch.dtype


Expr = Src | Filled | Const | Call | Part | Pieces | Replay | Missing


def cast(expr: Expr, dtype: torch.dtype) -> Expr:
    """The expression's numbers in another dtype, as ``copy_`` converts them."""
    if expr.dtype == dtype:
        return expr
    if isinstance(expr, (Filled, Missing)):
        return type(expr)(_filled_as(expr, dtype), expr.size, dtype)
    cast = torch.ops.aten._to_copy.default
    return Call(cast, (expr,), {"dtype": dtype}, None, expr.size, dtype, pointwise=True)


def _filled_as(expr: Filled | Missing, dtype: torch.dtype) -> Any:
    if isinstance(expr, Missing):
        return expr.what
    return torch.full((), expr.value, dtype=expr.dtype).to(dtype).item()


def as_dtype(expr: Expr, dtype: torch.dtype) -> Expr:
    """The expression's bits read as another dtype of the same size."""
    if expr.dtype == dtype:
        return expr
    if isinstance(expr, Src):
        return Src(expr.leaf, expr.view, dtype)
    bits = torch.ops.aten.view.dtype
    return Call(bits, (expr, dtype), {}, None, expr.size, dtype, pointwise=True)


def reshaped(expr: Expr, size: tuple[int, ...]) -> Expr:
    """The same elements in the same order under another size (one that merges dimensions)."""
    if isinstance(expr, Filled):
        return Filled(expr.value, size, expr.dtype)
    reshape = torch.ops.aten.reshape.default
    return Call(reshape, (expr, list(size)), {}, None, size, expr.dtype, pointwise=False)


def exprs_in(tree: Any) -> Iterator[Expr]:
    """The expressions inside nested tuples, lists and dicts."""
    if isinstance(tree, (Src, Filled, Const, Call, Part, Pieces, Replay, Missing)):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from exprs_in(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from exprs_in(item)
