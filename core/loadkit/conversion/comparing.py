"""Two tensors compared slab by slab: bits, or how far their numbers lie apart."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from loadkit.conversion.outputs import Output, read_slabs, rows_at_once, slab_of
from loadkit.readers.base import Reader

__all__ = ["Difference", "compare"]

SLAB = 16 << 20  # bytes of a tensor that are compared at once
CHUNK = 1 << 20  # elements whose numbers are looked at at once

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """How a tensor differs.

    Attributes:
        tensor: its name.
        what: "shape", "dtype" or "values", the first that holds.
        a_dtype, b_dtype: torch names.
        a_shape, b_shape: in elements.
        differing: elements with other numbers (other bits, where only bits were compared).
        max_abs, max_rel: the largest difference, and the largest relative to the larger of two
            numbers; infinite where one is NaN or infinite and the other is not; None where they
            are no numbers (packed elements, another shape).
        first: the first differing element, counted row-major.
    """

    tensor: str
    what: str
    a_dtype: str
    b_dtype: str
    a_shape: Shape
    b_shape: Shape
    differing: int = 0
    max_abs: float | None = None
    max_rel: float | None = None
    first: int | None = None


@dataclass
class _Tally:
    differing: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    first: int | None = None
    beyond: bool = False  # more than the tolerance
    numeric: bool = field(default=True)


def compare(
    a: Output, b: Output, read_a: Reader, read_b: Reader, tolerance: float | None
) -> Difference | None:
    """The difference of two tensors of one name; None where there is none.

    Args:
        a, b: the tensors.
        read_a, read_b: what reads for each.
        tolerance: None: bits and dtypes; else how far two elements may lie apart, times the
            larger of 1 and their size.

    Raises:
        ReadFailure: one of them could not be read.
    """
    if a.size != b.size:
        return _difference(a, b, "shape", None)
    tally = _Tally()
    at = 0
    for start, rows in _cuts(a, b):
        (one,), _, _ = read_slabs([slab_of(a, start, rows)], read_a)
        (two,), _, _ = read_slabs([slab_of(b, start, rows)], read_b)
        at = _tally(tally, one.view(a.dtype), two.view(b.dtype), at, tolerance)
    if a.dtype != b.dtype and tolerance is None:
        return _difference(a, b, "dtype", tally)
    bad = tally.differing if tolerance is None or not tally.numeric else tally.beyond
    return _difference(a, b, "values", tally) if bad else None


def _cuts(a: Output, b: Output) -> Iterator[tuple[int, int | None]]:
    """First row and number of rows of what is compared at once; None: all of them."""
    steps = [rows_at_once(one, SLAB) for one in (a, b)]
    if steps[0] is None or steps[1] is None:
        yield 0, None
        return
    step = min(steps[0], steps[1])
    for start in range(0, next(n for n in a.size if n > 1), step):
        yield start, step


def _difference(a: Output, b: Output, what: str, tally: _Tally | None) -> Difference:
    known = tally is not None and tally.numeric
    return Difference(
        a.name,
        what,
        str(a.dtype).removeprefix("torch."),
        str(b.dtype).removeprefix("torch."),
        a.size,
        b.size,
        tally.differing if tally is not None else 0,
        tally.max_abs if tally is not None and known else None,
        tally.max_rel if tally is not None and known else None,
        tally.first if tally is not None else None,
    )


def _tally(
    tally: _Tally, a: torch.Tensor, b: torch.Tensor, at: int, tolerance: float | None
) -> int:
    """Add flat elements of one slab; returns how many elements have been seen."""
    count = a.numel()
    if a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
        return at + count
    for start in range(0, count, CHUNK):
        one, two = a[start : start + CHUNK], b[start : start + CHUNK]
        numbers = _numbers(one), _numbers(two)
        if numbers[0] is None or numbers[1] is None:
            tally.numeric = False
            apart = _other_bits(one, two)
        else:
            apart = _apart(tally, numbers[0], numbers[1], tolerance)
            if tolerance is None and a.dtype == b.dtype:
                apart |= _other_bits(one, two)
        found = int(apart.sum())
        if found and tally.first is None:
            tally.first = at + start + int(apart.to(torch.uint8).argmax())
        tally.differing += found
    return at + count


def _numbers(tensor: torch.Tensor) -> torch.Tensor | None:
    """The elements as float64; None where they are packed."""
    if tensor.dtype.is_complex:
        return tensor.to(torch.complex128)
    if tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point:
        if "x2" in str(tensor.dtype):
            return None
        tensor = tensor.to(torch.float32)
    return tensor.to(torch.float64)


def _other_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.dtype != b.dtype:
        return torch.ones(a.numel(), dtype=torch.bool)
    size = a.dtype.itemsize
    bits = [t.view(torch.uint8).view(-1, size) for t in (a, b)]
    return (bits[0] != bits[1]).any(dim=1)


def _apart(
    tally: _Tally, a: torch.Tensor, b: torch.Tensor, tolerance: float | None
) -> torch.Tensor:
    """Which elements are other numbers; two NaNs are one number. Notes how far they lie apart."""
    same = (a == b) | (a.isnan() & b.isnan())
    far = (a - b).abs()
    far[same] = 0.0
    far[far.isnan()] = math.inf
    size = torch.maximum(a.abs(), b.abs())
    relative = far / size
    relative[same] = 0.0
    relative[relative.isnan()] = math.inf
    if far.numel():
        tally.max_abs = max(tally.max_abs, float(far.max()))
        tally.max_rel = max(tally.max_rel, float(relative.max()))
    if tolerance is not None:
        allowed = tolerance * size.nan_to_num(nan=0.0, posinf=0.0).clamp(min=1.0)
        tally.beyond = tally.beyond or bool((far > allowed).any())
    return ~same
