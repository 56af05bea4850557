"""A plan's rows read backwards: which elements of a parameter are a checkpoint tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from loadkit.load_plan import Region

if TYPE_CHECKING:
    from loadkit.load_plan import Row

__all__ = ["inverse", "is_copy"]

_COPIES = {"copy", "cast", "fused", "expert"}  # nothing but the dtype differs

Shape = tuple[int, ...]


def is_copy(row: Row) -> bool:
    """Whether a row's target holds its tensor's own numbers, as far as the dtype goes."""
    return row.kind in _COPIES


def inverse(rows: Sequence[Row], param: torch.Tensor, shape: Shape) -> torch.Tensor | None:
    """The view of a parameter that is one whole checkpoint tensor of this shape.

    Args:
        rows: all rows of the tensor that lead into the parameter; all of them copies.
        param: the parameter, with the shape it was loaded with.
        shape: the tensor's shape in its file.

    Returns:
        The view, or None where the rows do not cover the tensor, or are in no one piece.
    """
    joined = _joined(rows)
    if joined is None:
        return None
    source, target = joined
    if source.offset or not param.is_contiguous():
        return None
    # Dims of the file, outermost first: the region may show them transposed.
    order = sorted(range(len(source.size)), key=lambda d: (-source.stride[d], source.size[d]))
    step = 1
    for d in reversed(order):
        if source.size[d] != 1 and source.stride[d] != step:
            return None
        step *= source.size[d]
    total = 1
    for n in shape:
        total *= n
    if step != total:
        return None
    size = tuple(source.size[d] for d in order)
    stride = tuple(target.stride[d] for d in order)
    view = param.detach().as_strided(size, stride, param.storage_offset() + target.offset)
    try:
        return view if size == shape else view.view(shape)
    except RuntimeError:  # the shape crosses a border of the parameter
        return None


def _joined(rows: Sequence[Row]) -> tuple[Region, Region] | None:
    """One row in place of several that follow each other along the first dim."""
    pairs = [(row.source, row.target) for row in rows if row.source and row.target]
    if not pairs or len(pairs) < len(rows):
        return None
    pairs.sort(key=lambda pair: pair[0].offset)
    source, target = pairs[0]
    for more, place in pairs[1:]:
        if not source.size or source.size[1:] != more.size[1:]:
            return None
        if source.stride != more.stride or target.stride != place.stride:
            return None
        n = source.size[0]
        if (source.offset + n * source.stride[0], target.offset + n * target.stride[0]) != (
            more.offset,
            place.offset,
        ):
            return None
        size = (n + more.size[0], *source.size[1:])
        source = Region(source.offset, size, source.stride)
        target = Region(target.offset, size, target.stride)
    return source, target
