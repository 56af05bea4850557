"""What an accelerator does with bytes that have arrived: values, casts, rows to their places."""

from __future__ import annotations

from math import gcd
from typing import Any

import torch

from loadkit.errors import TraceError
from loadkit.staging_jobs import Rows
from loadkit.tracing.evaluate import Fetch
from loadkit.tracing.expressions import Call, Const, Expr, Filled, Pieces, Src

__all__ = ["cast_source", "differs", "may_overflow", "new_infinities", "scatter_rows", "value_of"]

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def value_of(expr: Expr, fetch: Fetch, device: torch.device) -> torch.Tensor:
    """The value, on a device, of an expression that ``is_staged`` allows.

    Args:
        expr: regions of files, constants, and calls that every device computes alike.
        fetch: gives a region on that device.
        device: where constants are put.
    """
    if isinstance(expr, Src):
        return fetch(expr)
    if isinstance(expr, Const):
        return expr.tensor.to(device)
    if isinstance(expr, Filled):
        return torch.full((), expr.value, dtype=expr.dtype, device=device).expand(expr.size)
    if isinstance(expr, Pieces):
        out = torch.empty(expr.size, dtype=expr.dtype, device=device)
        for view, part in expr.parts:
            out.as_strided(view.size, view.stride, view.offset).copy_(value_of(part, fetch, device))
        return out
    if not isinstance(expr, Call):
        raise TraceError(f"{type(expr).__name__} is no expression for a device")
    kwargs = {key: _real(item, fetch, device) for key, item in expr.kwargs.items()}
    result: torch.Tensor = expr.func(*_real(expr.args, fetch, device), **kwargs)
    if tuple(result.size()) != expr.size or result.dtype != expr.dtype:
        raise TraceError(
            f"{expr.func} gave {list(result.size())} {result.dtype} when it was executed, and "
            f"{list(expr.size)} {expr.dtype} when it was recorded"
        )
    return result


def _real(tree: Any, fetch: Fetch, device: torch.device) -> Any:
    """A call's arguments with values in place of expressions."""
    if isinstance(tree, (Src, Const, Filled, Call, Pieces)):
        return value_of(tree, fetch, device)
    if isinstance(tree, torch.Tensor):
        return tree.to(device)
    if isinstance(tree, (tuple, list)):
        return type(tree)(_real(item, fetch, device) for item in tree)
    return tree


def scatter_rows(to: Rows, scratch: torch.Tensor, flat: torch.Tensor) -> None:
    """Rows of scratch memory to their places, by the widest words that all of them begin at."""
    into = flat[to.target : to.target + (to.rows - 1) * to.target_stride + to.row_bytes]
    start = int(into.storage_offset())
    word = gcd(8, start, to.row_bytes, to.scratch_stride, to.target_stride)
    size = to.rows, to.row_bytes // word
    dtype = _WORDS[word]
    source = scratch[: (to.rows - 1) * to.scratch_stride + to.row_bytes].view(dtype)
    into.view(dtype).as_strided(size, (to.target_stride // word, 1), start // word).copy_(
        source.as_strided(size, (to.scratch_stride // word, 1), 0)
    )


def differs(mine: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Whether any bit does, as a tensor on the device."""
    if mine.dtype != other.dtype or mine.size() != other.size():
        return torch.ones((), dtype=torch.bool)
    a, b = (t.contiguous().view(-1).view(torch.uint8) for t in (mine, other))
    return (a != b).any()


def new_infinities(made: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Whether a cast made an infinity of a finite number, as a tensor on the device."""
    # 8-bit floats have no comparisons
    a, b = (t.to(torch.float32) if t.itemsize == 1 else t for t in (made, source))
    return (torch.isinf(a) & ~torch.isinf(b)).any()


def cast_source(expr: Expr) -> Expr | None:
    """What a plain cast converts, or None if the expression is no plain cast."""
    if isinstance(expr, Call) and expr.func is torch.ops.aten._to_copy.default:
        source: Expr = expr.args[0]
        return source
    return None


def may_overflow(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a cast may turn a finite number into infinity."""
    if not (source.is_floating_point and target.is_floating_point):
        return False
    return torch.finfo(target).max < torch.finfo(source).max
