"""Reads and writes by index: runs of consecutive indices are copies, the rest has a mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from loadkit.tracing.deferred import defer
from loadkit.tracing.lazies import as_lazy, blank_like, realise, scratch
from loadkit.tracing.lazy_tensor import LazyTensor
from loadkit.tracing.schema import aten
from loadkit.tracing.storage import Fill, Storage, Unwritten
from loadkit.tracing.view import contiguous
from loadkit.tracing.writes import record, record_copy

if TYPE_CHECKING:
    from loadkit.tracing.recorder import Recorder

__all__ = ["INDEX_WRITES", "index_call", "index_select"]


def index_call(recorder: Recorder | None, source: torch.Tensor, indices: list[Any]) -> Any:
    """``x[indices]``."""
    single = _single_index(source, indices, recorder)
    if single is not None:
        return _take(recorder, source, *single)
    if not any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return NotImplemented
    plain: list[Any] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            plain.append(index)
            continue
        covered = tuple(source.size())[len(plain) : len(plain) + index.dim()]
        if tuple(index.size()) != covered:
            raise IndexError(f"a mask of size {list(index.size())} for a size {list(covered)}")
        plain += realise(index, recorder).nonzero().unbind(1)
    return defer(aten.index.Tensor, (source, plain), {}, recorder)


def index_select(recorder: Recorder | None, source: torch.Tensor, dim: int, index: Any) -> Any:
    """``x.index_select(dim, index)``."""
    real = _plain_index(index, recorder)
    return NotImplemented if real is None else _take(recorder, source, dim, real)


def _take(recorder: Recorder | None, source: torch.Tensor, dim: int, index: torch.Tensor) -> Any:
    size = list(source.size())
    size[dim] = index.numel()
    out = scratch(tuple(size), source.dtype, Unwritten("a selection"))
    for first, at, count in _index_runs(index, source.size(dim)):
        record_copy(out.narrow(dim, at, count), source.narrow(dim, first, count), recorder)
    return out


def _index_runs(index: torch.Tensor, length: int) -> list[tuple[int, int, int]]:
    """(first target row, first source row, count) of each run of consecutive indices."""
    rows = index.tolist()
    runs: list[tuple[int, int, int]] = []
    for at, row in enumerate(rows):
        if not -length <= row < length:
            raise IndexError(f"index {row} is out of range for a dimension of {length}")
        row %= length
        if runs and runs[-1][0] + runs[-1][2] == row:
            first, source, count = runs[-1]
            runs[-1] = (first, source, count + 1)
        else:
            runs.append((row, at, 1))
    return runs


def _plain_index(index: Any, recorder: Recorder | None) -> torch.Tensor | None:
    """A 1-d integer index as a real tensor, else None."""
    if not isinstance(index, torch.Tensor) or index.dim() > 1:
        return None
    return realise(index, recorder).reshape(-1)


def _positions(index: torch.Tensor, length: int, recorder: Recorder | None) -> torch.Tensor | None:
    """As ``_plain_index``, for ``x[index]``: a mask becomes the positions where it is true."""
    real = _plain_index(index, recorder)
    if real is None or real.dtype not in (torch.bool, torch.uint8):
        return real
    if real.numel() != length:
        raise IndexError(f"a mask of {real.numel()} elements for a dimension of {length}")
    return real.nonzero().reshape(-1)


def _single_index(
    of: torch.Tensor, indices: list[Any], recorder: Recorder | None
) -> tuple[int, torch.Tensor] | None:
    used = [(d, i) for d, i in enumerate(indices) if i is not None]
    if len(used) != 1 or used[0][1].dim() != 1:
        return None
    dim, index = used[0]
    real = _positions(index, of.size(dim), recorder)
    return None if real is None else (dim, real)


def _index_put(
    recorder: Recorder | None,
    target: torch.Tensor,
    indices: list[Any],
    values: torch.Tensor,
    accumulate: bool = False,
) -> bool:
    if accumulate:
        return False
    single = _single_index(target, indices, recorder)
    if single is None:
        mask = torch.zeros(tuple(target.size()), dtype=torch.bool)
        real = [None if i is None else realise(i, recorder) for i in indices]
        mask[tuple(slice(None) if i is None else i for i in real)] = True
        blank = blank_like(target)
        put = defer(aten.index_put.default, (blank, real, values), {}, recorder)
        record_copy(target, put, recorder, mask.reshape(-1))
        return True
    dim, index = single
    shape = list(target.size())
    shape[dim] = index.numel()
    wide = as_lazy(values, recorder).expand(shape)
    for first, source, count in _index_runs(index, target.size(dim)):
        record_copy(target.narrow(dim, first, count), wide.narrow(dim, source, count), recorder)
    return True


def _index_copy(
    recorder: Recorder | None, target: torch.Tensor, dim: int, index: Any, source: torch.Tensor
) -> bool:
    real = _plain_index(index, recorder)
    if real is None:
        return False
    for first, at, count in _index_runs(real, target.size(dim)):
        record_copy(target.narrow(dim, first, count), source.narrow(dim, at, count), recorder)
    return True


def _index_fill(
    recorder: Recorder | None, target: torch.Tensor, dim: int, index: Any, value: Any
) -> bool:
    real = _plain_index(index, recorder)
    if real is None or isinstance(value, torch.Tensor):
        return False
    for first, _, count in _index_runs(real, target.size(dim)):
        record(target.narrow(dim, first, count), Fill(value, target.dtype), recorder)
    return True


def _masked_fill(
    recorder: Recorder | None, target: torch.Tensor, mask: torch.Tensor, value: Any
) -> bool:
    real = realise(mask, recorder)
    wide = real.to(torch.bool).expand(tuple(target.size())).reshape(-1).clone()
    if isinstance(value, torch.Tensor):
        record_copy(target, value, recorder, wide)
        return True
    storage = Storage(Fill(value, target.dtype), target.numel(), target.dtype.itemsize)
    filled = LazyTensor(
        storage, contiguous(tuple(target.size()), target.dtype.itemsize), target.dtype
    )
    record_copy(target, filled, recorder, wide)
    return True


INDEX_WRITES: dict[Any, Callable[..., bool]] = {
    aten.index_put_.default: _index_put,
    aten._index_put_impl_.default: lambda r, t, i, v, accumulate=False, unsafe=False: _index_put(
        r, t, i, v, accumulate
    ),
    aten.index_copy_.default: _index_copy,
    aten.index_fill_.int_Scalar: _index_fill,
    aten.masked_fill_.Scalar: _masked_fill,
    aten.masked_fill_.Tensor: _masked_fill,
}
