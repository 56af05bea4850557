"""What goes to an accelerator through the staging ring, and in which portions.

Used twice: the plan counts with it, the read step works by it. No device is touched here.

A *job* fills one region of a target. Its *loads* bring bytes of files, densely, into the job's
memory on the device: the target itself, or scratch memory from which the job's last step scatters
rows, casts or computes. Jobs are cut into *portions*, portions are packed into slots of the ring.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from loadkit.execution import Moves, Target, chunks, fetch_strips
from loadkit.readers.base import Place, Reader, Survey
from loadkit.tracing.expressions import Call, Const, Expr, Filled, Pieces, Src
from loadkit.tracing.pairing import Strip
from loadkit.tracing.program import walk
from loadkit.tracing.storage import FileLeaf
from loadkit.tracing.view import View

__all__ = [
    "Fill",
    "Job",
    "Load",
    "Portion",
    "Rows",
    "Split",
    "check_jobs",
    "fills",
    "is_staged",
    "jobs_of",
    "places_of",
    "split",
    "survey_of",
]

ALIGN = 64  # bytes; what begins in a slot or in scratch begins at a multiple
GAP = 12 << 10  # bytes; rows this near are read with their gaps, and the device picks the rows

_aten = torch.ops.aten
_MOVES = {  # calls that only move bits, whatever the dtype
    *(_aten.view.dtype, _aten.reshape.default, _aten.expand.default, _aten.as_strided.default),
    *(_aten.cat.default, _aten.stack.default, _aten.clone.default),
    *(_aten.index.Tensor, _aten.index_select.default, _aten.flip.default),
}
_EXACT = {_aten.mul.Tensor, _aten.neg.default}  # one rounding: every device gives the same float32
_SUMS = {_aten.add.Tensor, _aten.sub.Tensor}  # the same, unless ``alpha`` scales the second one


class Load(NamedTuple):
    """``rows`` runs of a file's bytes that land densely at byte ``at`` of a job's memory."""

    leaf: FileLeaf
    offset: int  # in the file
    row_bytes: int
    rows: int
    file_stride: int
    at: int

    @property
    def nbytes(self) -> int:
        """Bytes that land."""
        return self.row_bytes * self.rows

    @property
    def place(self) -> Place:
        """Its side of the file."""
        return Place(
            self.leaf.info.file,
            self.offset,
            self.row_bytes,
            self.rows,
            self.file_stride,
            self.leaf.name,
        )


class Rows(NamedTuple):
    """Rows that go from scratch memory to a target; all of it in bytes."""

    target: int
    row_bytes: int
    rows: int
    scratch_stride: int
    target_stride: int


@dataclass(eq=False)
class Job:
    """One region of a target. At most one of ``scatter`` and ``expr`` is there.

    ``scratch`` is how many bytes of device memory it needs besides the target; 0: its loads land
    in the target. ``sources`` says where in scratch each region of a file lies that ``expr`` reads
    (by the leaf's id and the view asked for), and how it is seen there. With ``check``, the name
    of a tensor, the value is compared with the target and not written.
    """

    target: Target
    loads: list[Load]
    scratch: int = 0
    scatter: Rows | None = None
    view: View | None = None
    expr: Expr | None = None
    sources: dict[tuple[int, View], tuple[int, View]] = field(default_factory=dict)
    check: str | None = None

    @property
    def first(self) -> tuple[str, int]:
        """Its place in file order."""
        if not self.loads:
            return "", 0
        load = self.loads[0]
        return load.leaf.info.file.name, load.offset


class Portion(NamedTuple):
    """A part of a job's load, as it lies in a slot: ``load.nbytes`` bytes from ``at`` on."""

    job: Job
    load: Load
    at: int


Fill = list[list[Portion]]
"""What one call of a reader brings: the portions of one or several slots."""


class Split(NamedTuple):
    """A target's moves: what is staged, and the computed rest, which the host evaluates."""

    staged: Moves
    rest: list[tuple[View, Expr]]


def split(moves: Moves) -> Split:
    """Which of the moves of a target on a device go through the ring."""
    staged = [item for item in moves.computed if is_staged(item[1])]
    rest = [item for item in moves.computed if not is_staged(item[1])]
    return Split(moves._replace(computed=staged), rest)


def is_staged(expr: Expr) -> bool:
    """Whether a device gives the same bits as the host for this, from bytes of files alone."""
    reads = False
    for item in walk(expr):
        if isinstance(item, Src):
            if not isinstance(item.leaf, FileLeaf):
                return False
            reads = True
        elif isinstance(item, Const):
            if item.source is None and item.tensor.dim():
                return False  # it may be memory of a live model, which is written meanwhile
        elif isinstance(item, Call):
            if not _is_exact(item):
                return False
        elif not isinstance(item, (Filled, Pieces)):
            return False
    return reads


def _is_exact(call: Call) -> bool:
    if call.output is not None:
        return False
    if call.func in _MOVES:
        return True
    if call.func is _aten._to_copy.default:
        source: torch.dtype = call.args[0].dtype
        return call.dtype.is_floating_point or not source.is_floating_point
    if call.func in _EXACT or (call.func in _SUMS and not call.kwargs and len(call.args) == 2):
        dtypes = [getattr(item, "dtype", torch.float32) for item in call.args]  # or a number
        return call.dtype == torch.float32 and all(each == torch.float32 for each in dtypes)
    return False


def jobs_of(target: Target, staged: Moves, slot_bytes: int) -> Iterator[Job]:
    """The jobs that fill a target on a device."""
    for leaf, strip in staged.strips:
        yield from _strip_jobs(target, leaf, strip, slot_bytes)
    for view, expr in staged.computed:
        for part_view, part in chunks(view, expr):
            yield _computed(target, part_view, part)


def check_jobs(target: Target) -> Iterator[Job]:
    """The jobs that compare a target with the second tensors that hold its numbers."""
    for view, expr, tensor in target.checks:
        if is_staged(expr):
            for part_view, part in chunks(view, expr):
                job = _computed(target, part_view, part)
                job.check = tensor
                yield job


def _strip_jobs(target: Target, leaf: FileLeaf, strip: Strip, slot_bytes: int) -> Iterator[Job]:
    start = leaf.info.offset + strip.source
    _, _, row_bytes, rows, stride, target_stride = strip
    load = Load(leaf, start, row_bytes, rows, stride, strip.target)
    dense = rows == 1 or target_stride == row_bytes
    gaps = rows > 1 and 0 < stride - row_bytes <= GAP and stride <= slot_bytes
    if dense and not gaps:
        yield Job(target, [load])
        return
    step = slot_bytes // (stride if gaps else row_bytes)
    if not step:  # rows longer than a slot
        for row in range(rows):
            at = strip.target + row * target_stride
            yield Job(target, [Load(leaf, start + row * stride, row_bytes, 1, row_bytes, at)])
        return
    for row in range(0, rows, step):
        count = min(step, rows - row)
        offset = start + row * stride
        if gaps:
            span = (count - 1) * stride + row_bytes
            load = Load(leaf, offset, span, 1, span, 0)
        else:
            load = Load(leaf, offset, row_bytes, count, stride, 0)
        place = strip.target + row * target_stride
        scatter = Rows(place, row_bytes, count, stride if gaps else row_bytes, target_stride)
        yield Job(target, [load], load.nbytes, scatter)


def _computed(target: Target, view: View, expr: Expr) -> Job:
    """A job that evaluates an expression; each region of a file that stands in it is one load."""
    job = Job(target, [], view=view, expr=expr)
    for src in walk(expr):
        if not isinstance(src, Src) or not isinstance(src.leaf, FileLeaf):
            continue
        key = (id(src.leaf), src.view)
        if key in job.sources:
            continue
        strips, shown = fetch_strips(src.view)
        job.sources[key] = job.scratch, shown
        end = job.scratch
        for s in strips:  # they lie densely, in order
            offset = src.leaf.info.offset + s.source
            job.loads.append(Load(src.leaf, offset, s.row_bytes, s.rows, s.source_stride, end))
            end += s.rows * s.row_bytes
        job.scratch = -(-end // ALIGN) * ALIGN
    job.loads = [load for load in job.loads if load.nbytes]
    return job


def fills(jobs: Iterable[Job], slot_bytes: int, slots: int) -> Iterator[Fill]:
    """The jobs' loads in order, packed into slots; ``slots`` of them (or less) to a fill."""
    fill: Fill = [[]]
    used = 0
    for job in jobs:
        left = deque(job.loads)
        while left:
            load = left.popleft()
            head, tail = _cut(load, slot_bytes - used, whole=used == 0)
            left.extendleft(reversed(tail))
            if head is not None:
                fill[-1].append(Portion(job, head, used))
                used += -(-head.nbytes // ALIGN) * ALIGN
            if tail or used >= slot_bytes:  # full
                if len(fill) == slots:
                    yield fill
                    fill = []
                fill.append([])
                used = 0
    if fill[-1] or len(fill) > 1:
        yield [slot for slot in fill if slot]


def _cut(load: Load, room: int, *, whole: bool) -> tuple[Load | None, Sequence[Load]]:
    """What of a load fits into ``room`` bytes, and what is left of it.

    Nothing fits where not even one row does, unless the room is a ``whole`` slot.
    """
    if load.nbytes <= room:
        return load, ()
    leaf, offset, row_bytes, rows, stride, at = load
    if rows == 1 or stride == row_bytes:
        if room <= 0:
            return None, (load,)
        rest = load.nbytes - room
        head = Load(leaf, offset, room, 1, room, at)
        return head, (Load(leaf, offset + room, rest, 1, rest, at + room),)
    count = room // row_bytes
    if count:
        more = offset + count * stride, row_bytes, rows - count, stride, at + count * row_bytes
        return Load(leaf, offset, row_bytes, count, stride, at), (Load(leaf, *more),)
    if not whole:
        return None, (load,)
    first = Load(leaf, offset, row_bytes, 1, row_bytes, at)
    others = Load(leaf, offset + stride, row_bytes, rows - 1, stride, at + row_bytes)
    head_, tail = _cut(first, room, whole=True)
    return head_, (*tail, others)


def places_of(fill: Fill) -> list[Portion]:
    """A fill's portions as a reader wants them: sorted by file and offset."""
    portions = [portion for slot in fill for portion in slot]
    portions.sort(key=lambda p: (p.load.leaf.info.file.name, p.load.offset))
    return portions


def survey_of(packed: Iterable[Fill], reader: Reader) -> Survey:
    """What a reader takes from files for these fills, and in how many requests."""
    nbytes = requests = 0
    for fill in packed:
        more = reader.survey([portion.load.place for portion in places_of(fill)])
        nbytes, requests = nbytes + more.nbytes, requests + more.requests
    return Survey(nbytes, requests)
