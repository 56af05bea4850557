"""One tensor of a target before it is written: its name and shape there, and what it is made of.

What it is made of is a recorded value, so that any rows of it can be asked for: those are read
straight from the source's files, cast or decoded where that is more than a copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from loadkit.execution import Target
from loadkit.read import read_targets
from loadkit.readers.base import Reader
from loadkit.safetensors_writer import Entry, entry_of
from loadkit.tracing.evaluate import strided
from loadkit.tracing.expressions import Expr, Filled, Missing, Part, Replay, cast
from loadkit.tracing.program import resolve_region, walk
from loadkit.tracing.storage import Storage, Unwritten, Value
from loadkit.tracing.view import View, contiguous

__all__ = ["BUDGET", "Output", "Slab", "read_slabs", "rows_at_once", "slab_of", "slabs_of"]

BUDGET = 64 << 20  # bytes of tensors that are read before they are written
ALIGNED = 64  # bytes; a slab begins at a multiple of it


@dataclass(frozen=True, eq=False)
class Output:
    """One tensor to write.

    Attributes:
        name: its name in the target.
        value: its elements; the recorded value's dtype may be another than ``dtype``.
        dtype: the one it is written in.
        row, rows: of a parameter that is cut over several files, the first row that this is, and
            how many rows it has; None: it is not cut.
    """

    name: str
    value: Value
    dtype: torch.dtype
    row: int = 0
    rows: int | None = None

    @property
    def size(self) -> tuple[int, ...]:
        """Its shape in elements of torch."""
        return self.value.view.size

    @property
    def nbytes(self) -> int:
        """Bytes it takes in the target."""
        return math.prod(self.size) * self.dtype.itemsize

    def entry(self) -> Entry:
        """How a safetensors header describes it.

        Raises:
            ModelError: E_NAME, E_DTYPE or E_SHAPE: safetensors cannot hold that.
        """
        meta = torch.empty(self.size, dtype=self.dtype, device="meta")
        return replace(entry_of(self.name, meta), blocks=_unread)

    def pieces(self, view: View) -> list[tuple[View, Expr]]:
        """What a region of the value's storage is made of, each piece with its place in it."""
        out = contiguous(view.size, self.dtype.itemsize)
        if not view.numel:
            return []
        found = resolve_region(self.value.storage, self.value.version, view, out, self.value.dtype)
        return [(place, cast(_filled(expr), self.dtype)) for place, expr in found]


def _unread() -> Iterator[bytes]:
    raise RuntimeError("an output is read by slabs")


def _filled(expr: Expr) -> Expr:
    """Zeros where nothing was written: the plan has allowed that, with a reason."""
    return Filled(0, expr.size, expr.dtype) if isinstance(expr, Missing) else expr


@dataclass(frozen=True, slots=True, eq=False)
class Slab:
    """A run of an output's bytes, row-major: all of it, or some of its rows."""

    output: Output
    view: View
    nbytes: int
    pieces: list[tuple[View, Expr]]


def slabs_of(output: Output, budget: int = BUDGET) -> Iterator[Slab]:
    """An output in order, in slabs of at most about ``budget`` bytes."""
    rows = rows_at_once(output, budget)
    if rows is None:
        yield slab_of(output)
        return
    for start in range(0, output.size[_dim(output)], rows):
        yield slab_of(output, start, rows)


def slab_of(output: Output, start: int = 0, rows: int | None = None) -> Slab:
    """Rows of an output, or all of it."""
    view = output.value.view
    if rows is not None:
        dim = _dim(output)
        view = view.narrow(dim, start, min(rows, view.size[dim] - start))
    return Slab(output, view, view.numel * output.dtype.itemsize, output.pieces(view))


def rows_at_once(output: Output, budget: int) -> int | None:
    """How many rows an output is cut into slabs by; None if it is not cut.

    Uncut stays what an operation needs whole: it would be computed anew for every slab.
    """
    if output.nbytes <= budget or max(output.size, default=1) < 2:
        return None
    if _is_whole(output.pieces(output.value.view)):
        return None
    length = output.size[_dim(output)]
    return max(1, budget * length // output.nbytes)


def _dim(output: Output) -> int:
    """The dimension that rows are counted along: the first that is no single row."""
    return next(d for d, n in enumerate(output.size) if n > 1)


def _is_whole(pieces: Sequence[tuple[View, Expr]]) -> bool:
    return any(isinstance(item, (Part, Replay)) for _, expr in pieces for item in walk(expr))


def read_slabs(
    slabs: Sequence[Slab], reader: Reader, arena: torch.Tensor | None = None
) -> tuple[list[torch.Tensor], int, Mapping[str, None]]:
    """Slabs in memory, the bytes that were read for them, and what overflowed in a cast.

    Args:
        slabs: what to read.
        reader: what reads.
        arena: flat uint8 memory that is used as far as it goes: touching new memory is what costs
            most, and the C library keeps what is given back in small pieces.

    Returns:
        Flat uint8 tensors in the order of ``slabs``; bytes; checkpoint names of tensors whose
        finite numbers became infinite.

    Raises:
        ReadFailure: a file failed, ended early, or changed.
        ResourceError: no memory.
    """
    targets: list[Target] = []
    used = 0
    for slab in slabs:
        dtype = slab.output.dtype
        view = contiguous(slab.view.size, dtype.itemsize)
        storage = Storage(Unwritten(slab.output.name), view.numel, view.itemsize)
        if arena is not None and used + slab.nbytes <= arena.numel() and slab.nbytes:
            storage.real = arena[used : used + slab.nbytes].view(dtype)
            used += -(-slab.nbytes // ALIGNED) * ALIGNED
        targets.append(Target((slab.output.name,), storage, view, dtype, False, slab.pieces))
    done, memory = read_targets(targets, reader, device=torch.device("cpu"), alias=False)
    flats = []
    for target in targets:
        flat = memory.get(id(target.storage))
        if flat is None:  # no elements
            flat = torch.empty(target.storage.numel, dtype=target.dtype)
        whole = strided(flat, contiguous((target.view.numel,), target.view.itemsize), target.dtype)
        flats.append(whole.view(torch.uint8))
    return flats, done.bytes_read, dict.fromkeys(done.overflows)
