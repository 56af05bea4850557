"""The staging ring: bytes of files go through a few pinned buffers to an accelerator.

Threads take fills in file order, read them into free slots, and launch the copies; the device
casts and scatters what has arrived. A slot is used again when the event after its last copy is
done, so the host holds ``slots * slot_bytes`` bytes, however large the checkpoint is. A parameter
is allocated on the device when the first fill that concerns it is taken.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Self

import torch

from loadkit.device_layer import DeviceLayer, Event, device_error
from loadkit.errors import LoadkitError, ModelError
from loadkit.execution import Target
from loadkit.readers.base import Extent, Reader
from loadkit.readers.threads import Task, run_tasks, threads_for
from loadkit.staging_jobs import Fill, Job, Portion, fills, places_of
from loadkit.staging_math import (
    cast_source,
    differs,
    may_overflow,
    new_infinities,
    scatter_rows,
    value_of,
)
from loadkit.text import printable
from loadkit.tracing.evaluate import strided
from loadkit.tracing.expressions import Expr, Src

if TYPE_CHECKING:
    from loadkit.config import LoadConfig

__all__ = ["Ring", "RingSize", "ring_size", "tied_error"]

Landed = Callable[[int], None]


@dataclass(frozen=True)
class RingSize:
    """How a ring is laid out: threads that read, slots, bytes of a slot, slots of one read."""

    threads: int
    slots: int
    slot_bytes: int
    slots_per_fill: int


def ring_size(load_config: LoadConfig, reader: Reader) -> RingSize:
    """The layout for a reader.

    Where several threads may call it, each fills one slot at a time. Otherwise one thread calls
    it, with half of the ring, and the copies of one half run while the other one is read.
    """
    slots = load_config.staging_slots
    if not reader.concurrent:
        return RingSize(1, slots, load_config.staging_slot_bytes, slots // 2)
    threads = min(threads_for(load_config, most=4), slots - 1)
    return RingSize(threads, slots, load_config.staging_slot_bytes, 1)


@dataclass(eq=False)
class _Slot:
    memory: torch.Tensor
    event: Event | None = None  # after its last copy


@dataclass(eq=False)
class _State:
    """A job under way: bytes that have not been copied yet, and its scratch memory."""

    waiting: int
    scratch: torch.Tensor | None = None


@dataclass
class _Verdicts:
    """Answers that lie on the device until the end, with the tensors they are about."""

    overflows: list[tuple[torch.Tensor, str]] = field(default_factory=list)
    differs: list[tuple[torch.Tensor, Target, str]] = field(default_factory=list)


class Ring:
    """Moves jobs to one device. Use it as a context manager; it may run several times.

    Args:
        layer: the device.
        reader: brings the bytes.
        size: the ring's layout.
        memory: the flat 1-d device memory of a target; allocated at the first call for it.
        landed: told how many bytes were read.
    """

    def __init__(
        self,
        layer: DeviceLayer,
        reader: Reader,
        size: RingSize,
        memory: Callable[[Target], torch.Tensor],
        landed: Landed | None = None,
    ) -> None:
        self._layer = layer
        self._reader = reader
        self._size = size
        self._memory = memory
        self._landed = landed
        self._lock = threading.Lock()  # of the slots' queue, and of the order of launches
        self._slots: deque[_Slot] = deque()  # free or being copied from, the oldest first
        self._made = 0
        self._jobs: dict[int, _State] = {}
        self._verdicts = _Verdicts()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for the device, then let go of all memory: slots may be read by it until then."""
        try:
            self._layer.finish()
        except Exception as error:
            if kind is None:
                raise device_error(error, "the last copies", self._layer.device) from error
        finally:
            self._slots.clear()
            self._jobs.clear()
            self._verdicts = _Verdicts()

    def run(self, jobs: Iterable[Job]) -> int:
        """Do the jobs, in the order of their first bytes; returns the bytes read from files.

        When it returns, the caller's own work on the device comes after all of them.

        Raises:
            ReadFailure: a file failed; the device failed (E_DEVICE).
            ResourceError: no memory on the device.
        """
        ordered = sorted(jobs, key=lambda job: job.first)
        self._jobs.clear()  # they are known by their id
        total = run_tasks(self._tasks(ordered), self._size.threads, self._landed)
        try:
            self._layer.finish()
        except Exception as error:
            raise device_error(error, "the copies of weights", self._layer.device) from error
        return total

    def overflows(self) -> list[str]:
        """Tensors that a cast turned into infinity, each once."""
        return list(dict.fromkeys(n for flag, n in self._verdicts.overflows if bool(flag)))

    def check(self) -> None:
        """Raise if a comparison found a difference.

        Raises:
            ModelError: TIED_DIFFER.
        """
        for flag, target, tensor in self._verdicts.differs:
            if bool(flag):
                raise tied_error(target, tensor)

    # -- taking work ---------------------------------------------------------------------------

    def _tasks(self, jobs: list[Job]) -> Iterator[Task]:
        """One task per fill, made as it is drawn; what it writes to is allocated then."""
        for job in jobs:
            if not job.loads:
                self._ready(job)
                self._launch(partial(self._finish, job, None), job.target.names[0])
        for fill in fills(jobs, self._size.slot_bytes, self._size.slots_per_fill):
            for slot in fill:
                for portion in slot:
                    self._ready(portion.job)
            yield partial(self._bring, fill)

    def _ready(self, job: Job) -> None:
        if id(job) in self._jobs:
            return
        try:
            self._memory(job.target)
        except LoadkitError:
            raise
        except Exception as error:
            raise self._typed(error, f"parameter {job.target.names[0]}") from error
        self._jobs[id(job)] = _State(sum(load.nbytes for load in job.loads))

    # -- one fill --------------------------------------------------------------------------------

    def _bring(self, fill: Fill) -> int:
        """Read one fill and launch its copies."""
        slots = [self._free_slot() for _ in fill]
        where = {id(p): slot.memory for slot, part in zip(slots, fill, strict=True) for p in part}
        nbytes = self._reader.read([_extent(p, where[id(p)]) for p in places_of(fill)])
        with self._lock:
            for slot, portions in zip(slots, fill, strict=True):
                for portion in portions:
                    work = partial(self._arrive, portion, slot.memory)
                    self._launch(work, portion.load.leaf.name, slot.memory)
                slot.event = self._layer.record()
                self._slots.append(slot)
        return nbytes

    def _free_slot(self) -> _Slot:
        """A slot whose copies are done: an old one, a new one, or the oldest when it is free.

        There is always one to wait for: threads hold fewer slots than there are.
        """
        with self._lock:
            old = bool(self._slots) and _is_free(self._slots[0])
            if old or self._made == self._size.slots:
                slot: _Slot | None = self._slots.popleft()
            else:
                slot = None
                self._made += 1
        try:
            if slot is None:
                return _Slot(self._new_slot(self._size.slot_bytes))
            if slot.event is not None:
                slot.event.wait()
        except Exception as error:
            raise self._typed(error, "the staging ring") from error
        slot.event = None
        return slot

    def _new_slot(self, nbytes: int) -> torch.Tensor:
        """Where the reader's bytes land before they are copied: on the device, if it can."""
        if self._reader.onto_device:
            return self._layer.empty(nbytes, torch.uint8)
        return self._layer.host_buffer(nbytes)

    def _launch(
        self, work: Callable[[], None], what: str, source: torch.Tensor | None = None
    ) -> None:
        try:
            self._layer.launch(work, source)
        except Exception as error:
            raise self._typed(error, f"tensor {printable(what)}", tensor=what) from error

    def _typed(self, error: Exception, what: str, **where: str) -> Exception:
        return device_error(error, what, self._layer.device, **where)

    # -- on the device ---------------------------------------------------------------------------

    def _arrive(self, portion: Portion, slot: torch.Tensor) -> None:
        """Copy a portion; after a job's last one, do the job's last step."""
        job, load, at = portion
        state = self._jobs[id(job)]
        if job.scratch:
            if state.scratch is None:
                state.scratch = self._layer.scratch(job.scratch)
            memory = state.scratch
        else:
            memory = self._memory(job.target).view(torch.uint8)
        memory[load.at : load.at + load.nbytes].copy_(
            slot[at : at + load.nbytes], non_blocking=True
        )
        state.waiting -= load.nbytes
        if not state.waiting:
            del self._jobs[id(job)]
            self._finish(job, state.scratch)

    def _finish(self, job: Job, scratch: torch.Tensor | None) -> None:
        flat = self._memory(job.target)
        if job.scatter is not None and scratch is not None:
            scatter_rows(job.scatter, scratch, flat.view(torch.uint8))
        elif job.expr is not None and job.view is not None:
            into = strided(flat, job.view, job.target.dtype)
            if job.check is None:
                self._compute(job, job.expr, into, scratch)
            else:
                flag = differs(into, self._value(job, job.expr, scratch))
                self._verdicts.differs.append((flag, job.target, job.check))

    def _compute(
        self, job: Job, expr: Expr, into: torch.Tensor, scratch: torch.Tensor | None
    ) -> None:
        from_ = cast_source(expr)
        value = self._value(job, expr if from_ is None else from_, scratch)
        into.copy_(value)
        if from_ is not None and may_overflow(value.dtype, into.dtype):
            flag = new_infinities(into, value)
            name = next((load.leaf.name for load in job.loads), job.target.names[0])
            self._verdicts.overflows.append((flag, name))

    def _value(self, job: Job, expr: Expr, scratch: torch.Tensor | None) -> torch.Tensor:
        def fetch(src: Src) -> torch.Tensor:
            at, shown = job.sources[id(src.leaf), src.view]
            if scratch is None:  # no elements
                return torch.empty(shown.size, dtype=src.dtype, device=self._layer.device)
            return strided(scratch[at : at + shown.span()[1]], shown, src.dtype)

        return value_of(expr, fetch, self._layer.device)


def _is_free(slot: _Slot) -> bool:
    return slot.event is None or slot.event.done()


def _extent(portion: Portion, slot: torch.Tensor) -> Extent:
    load = portion.load
    return Extent(
        file=load.leaf.info.file,
        offset=load.offset,
        row_bytes=load.row_bytes,
        rows=load.rows,
        file_stride=load.file_stride,
        dest=slot[portion.at : portion.at + load.nbytes],
        dest_stride=load.row_bytes,
        tensor=load.leaf.name,
    )


def tied_error(target: Target, tensor: str) -> ModelError:
    """Two tensors of the checkpoint are one parameter, and differ."""
    return ModelError(
        f"the model ties {' and '.join(target.names)}, and the checkpoint holds "
        f"other numbers for them: {printable(tensor)} differs",
        code="TIED_DIFFER",
        tensor=tensor,
        parameter=target.names[0],
        hint="if the checkpoint is right, untie them: hf_overrides={'tie_word_embeddings': False}",
    )
