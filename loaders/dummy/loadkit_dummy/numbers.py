"""Counter-based numbers: element i of tensor n is a hash of both, in any dtype."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch

from loadkit.tracing.view import View

__all__ = ["CHUNK", "LIMIT", "numbers"]

# Elements computed at once: more would be split over threads by each of a dozen operations on them,
# and would not stay in a cache. Measured: 19 ns an element at 2**18 of them, 8 at 2**15; on a busy
# machine, where the threads wait for each other, 260 and 8.
CHUNK = 1 << 15
LIMIT = 1e-3
_WORD = (1 << 64) - 1
_SMALL_E8M0 = 117  # 2**-10, just below the limit; this dtype has no zero and no sign


def numbers(view: View, *, seed: int, name: str, dtype: torch.dtype) -> torch.Tensor:
    """The elements of a strided view of tensor ``name``, as ``dtype``, on the CPU.

    Floats and complex parts lie in [-1e-3, 1e-3], integers in -1..1 (0..1 without a sign), bools
    are either. The same (seed, name, element) gives the same number, whatever the view.
    """
    out = torch.empty(view.size, dtype=dtype)
    key = int.from_bytes(
        hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "little"
    )
    for place, part in _parts(out, view):
        place.copy_(_as(dtype, _hash(_counters(part), key)))
    return out


def _parts(out: torch.Tensor, view: View) -> Iterator[tuple[torch.Tensor, View]]:
    """Pieces of at most CHUNK elements, cut along the leading dimensions."""
    if view.numel == 0:
        return
    if view.numel <= CHUNK or not view.size:
        yield out, view
        return
    inner = view.numel // view.size[0]
    step = max(1, CHUNK // inner)
    for start in range(0, view.size[0], step):
        count = min(step, view.size[0] - start)
        part = view.narrow(0, start, count)
        if step == 1 and inner > CHUNK:
            row = View(part.size[1:], part.stride[1:], part.offset, part.itemsize)
            yield from _parts(out[start], row)
        else:
            yield out.narrow(0, start, count), part


def _counters(view: View) -> torch.Tensor:
    """The row-major index of each element of the view, int64."""
    index = torch.full((1,) * len(view.size), view.offset, dtype=torch.int64)
    for dim, (n, stride) in enumerate(zip(view.size, view.stride, strict=True)):
        shape = [1] * len(view.size)
        shape[dim] = n
        index = index + (torch.arange(n, dtype=torch.int64) * stride).view(shape)
    return index


def _hash(counter: torch.Tensor, key: int) -> torch.Tensor:
    """splitmix64 of key + counter, as int64 (Steele, Lea, Flood 2014)."""
    x = counter * _signed(0x9E3779B97F4A7C15)
    x += _signed(key)
    x ^= _shift(x, 30)
    x *= _signed(0xBF58476D1CE4E5B9)
    x ^= _shift(x, 27)
    x *= _signed(0x94D049BB133111EB)
    x ^= _shift(x, 31)
    return x


def _signed(word: int) -> int:
    word &= _WORD
    return word - (1 << 64) if word >> 63 else word


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical right shift of signed words."""
    out = x >> bits
    out &= (1 << (64 - bits)) - 1
    return out


def _as(dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    if dtype == torch.bool:
        return (x & 1).to(torch.bool)
    if dtype == getattr(torch, "float8_e8m0fnu", None):
        return (_SMALL_E8M0 - (x & 3)).to(torch.uint8).view(dtype)
    if dtype == getattr(torch, "float4_e2m1fn_x2", None):
        return (x & 0x11).to(torch.uint8).view(dtype)  # each half 0 or 0.5, the smallest it has
    if dtype.is_complex:
        part = torch.complex(_unit(x), _unit(_hash(x, 1)))
        return part.to(dtype)
    if dtype.is_floating_point:
        small = _unit(x)
        made = small.to(dtype)
        if dtype.itemsize == 1:  # the nearest number that an 8-bit float has may lie outside
            made = torch.where(made.to(torch.float32).abs() > LIMIT, 0.0, small).to(dtype)
        return made
    if torch.iinfo(dtype).min == 0:
        return (x & 1).to(dtype)
    return (_shift(x, 32) % 3 - 1).to(dtype)


def _unit(x: torch.Tensor) -> torch.Tensor:
    """The top 24 bits as a float32 in [-LIMIT, LIMIT]."""
    unit = _shift(x, 40).to(torch.float32)
    unit *= 2.0 / ((1 << 24) - 1)
    unit -= 1.0
    unit *= LIMIT
    return unit
