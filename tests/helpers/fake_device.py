"""An accelerator made of CPU memory: work is done late and in order, and misuse is noticed.

What was launched runs when somebody waits for it (``lag`` says how much may be outstanding), as on
a device that is slower than its host. A host buffer that launched work still has to read is busy.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest
import torch

from loadkit import device_layer, tables
from loadkit.readers.base import Extent
from loadkit.readers.pread import PreadReader

__all__ = ["FakeDevice", "WatchedReader", "pretend"]

GARBAGE = 0xA5


@dataclass
class Bytes:
    """How much of a kind of memory there is, and was at most."""

    now: int = 0
    most: int = 0

    def take(self, nbytes: int) -> None:
        self.now += nbytes
        self.most = max(self.most, self.now)

    def give(self, nbytes: int) -> None:
        self.now -= nbytes


@dataclass
class FakeDevice:
    """A device layer. Faults come at the Nth call of a kind, counted from 1.

    Attributes:
        lag: launches that may be outstanding; the oldest is done when there are more.
        fail_launch, fail_late, fail_empty, fail_scratch: which one fails: at the call, when it is
            done, at an allocation.
        error: what is thrown.
        room: bytes of device memory there are.
    """

    lag: int = 1000
    fail_launch: int = 0
    fail_late: int = 0
    fail_empty: int = 0
    fail_scratch: int = 0
    error: Callable[[], Exception] = field(
        default=lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
    )
    room: int = 1 << 40
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self.pending: deque[tuple[int, Callable[[], None], int]] = deque()
        self.busy: Counter[int] = Counter()
        self.count: Counter[str] = Counter()
        self.host, self.memory, self.temporary = Bytes(), Bytes(), Bytes()
        self.done_until = 0
        self.broken: Exception | None = None
        self.released = 0

    # -- what the ring calls -----------------------------------------------------------------

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        self._count("host")
        return _tracked(nbytes, self.host)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        with self.lock:
            if self._count("empty") == self.fail_empty:
                raise self.error()
            nbytes = numel * dtype.itemsize
            if self.memory.now + self.temporary.now + nbytes > self.room:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
            return _tracked(nbytes, self.memory).view(dtype)

    def scratch(self, nbytes: int) -> torch.Tensor:
        if self._count("scratch") == self.fail_scratch:
            raise self.error()
        return _tracked(nbytes, self.temporary)

    def launch(self, work: Callable[[], None], source: torch.Tensor | None = None) -> None:
        with self.lock:
            if self._count("launch") == self.fail_launch:
                raise self.error()
            place = 0 if source is None else source.untyped_storage().data_ptr()
            self.busy[place] += 1
            self.pending.append((self.count["launch"], work, place))
            while len(self.pending) > self.lag:
                self._one()

    def record(self) -> FakeEvent:
        return FakeEvent(self, self.count["launch"])

    @contextmanager
    def home(self) -> Iterator[None]:
        yield

    def finish(self) -> None:
        self.run_until(self.count["launch"])

    def release(self) -> None:
        self.released += 1

    # -- what happens on the device ----------------------------------------------------------

    def run_until(self, ticket: int) -> None:
        with self.lock:
            while self.pending and self.pending[0][0] <= ticket:
                self._one()
            if self.broken is not None:
                raise self.broken

    def _one(self) -> None:
        ticket, work, place = self.pending.popleft()
        self.busy[place] -= 1
        if self.broken is None:  # a device that has failed does nothing more
            try:
                if ticket == self.fail_late:
                    raise self.error()
                work()
            except Exception as error:
                self.broken = error
        self.done_until = ticket

    def _count(self, what: str) -> int:
        with self.lock:
            self.count[what] += 1
            return self.count[what]


@dataclass
class FakeEvent:
    """Done when the work launched before it is."""

    layer: FakeDevice
    ticket: int

    def done(self) -> bool:
        return self.layer.done_until >= self.ticket

    def wait(self) -> None:
        self.layer.run_until(self.ticket)


class WatchedReader(PreadReader):
    """Refuses to read into a slot that the device has not copied from yet."""

    name: ClassVar[str] = "watched"
    layer: FakeDevice

    def read(self, extents: Sequence[Extent], landed: Callable[[int], None] | None = None) -> int:
        for extent in extents:
            place = extent.dest.untyped_storage().data_ptr()
            assert not self.layer.busy[place], f"{extent.tensor}: its slot is still being copied"
        return super().read(extents, landed)


def _tracked(nbytes: int, kind: Bytes) -> torch.Tensor:
    """Memory full of garbage that is counted until its last view is gone."""
    made = np.full(max(nbytes, 8), GARBAGE, dtype=np.uint8)
    kind.take(nbytes)
    weakref.finalize(made, kind.give, nbytes)
    return torch.from_numpy(made)[:nbytes]


def pretend(patch: pytest.MonkeyPatch, layer: FakeDevice) -> FakeDevice:
    """Have every load of this process think that the CPU is that accelerator.

    The reader ``watched`` is there too.
    """
    from loadkit import plan_costs

    for module in (device_layer, plan_costs):
        patch.setattr(module, "is_accelerator", lambda device: device.type == "cpu")
    patch.setattr(device_layer, "layer_of", lambda device: layer)
    patch.setattr(WatchedReader, "layer", layer, raising=False)
    tables.register_reader(WatchedReader.name, override=True)(WatchedReader)
    return layer
