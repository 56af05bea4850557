"""The read step's part on accelerators: which targets go through a staging ring, and how."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch

from loadkit import device_layer
from loadkit.device_layer import DeviceLayer
from loadkit.errors import DeviceError, ResourceError
from loadkit.execution import Moves, Target
from loadkit.readers.base import Reader, Survey
from loadkit.staging import Ring, ring_size
from loadkit.staging_jobs import Job, check_jobs, fills, is_staged, jobs_of, split, survey_of
from loadkit.tracing.evaluate import strided
from loadkit.tracing.expressions import Expr
from loadkit.tracing.storage import Storage

__all__ = ["Memory", "Stage", "StagedCost", "device_of", "staged_cost"]

Todo = list[tuple[Target, Moves]]


class Memory(Protocol):
    """The memory of storages, flat, as the read step keeps it."""

    flat: dict[int, torch.Tensor]
    layers: dict[torch.device, DeviceLayer]

    def of(self, storage: Storage, dtype: torch.dtype) -> torch.Tensor:
        """A storage's memory; allocated at its first use."""


def device_of(target: Target, device: torch.device) -> torch.device:
    """Where a target's memory is: a live module's own, else the load's device."""
    real = target.storage.real
    return device if real is None else real.device


class Stage:
    """The accelerators of one read step, each with a ring. A context manager.

    Where no target is on an accelerator it does nothing.

    Attributes:
        bytes_read: what its rings took from files.
        overflows: tensors that a cast turned into infinity.
    """

    def __init__(
        self,
        reader: Reader,
        memory: Memory,
        device: torch.device,
        landed: Callable[[int], None] | None,
    ) -> None:
        self.bytes_read = 0
        self.overflows: list[str] = []
        self._memory = memory
        self._device = device
        self._size = ring_size(reader.load_config, reader)
        self._landed = landed
        self._reader = reader

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        """After an error nothing of what was loaded stays on a device."""
        if error is None or not self._memory.layers:
            return
        self._memory.flat.clear()
        if isinstance(error, (ResourceError, DeviceError)):
            _let_go(error)
        for layer in self._memory.layers.values():
            layer.release()

    def fill(self, todo: Todo) -> Todo:
        """Do what devices do of these moves; gives the moves that are left for the host."""
        left: Todo = []
        staged: dict[torch.device, Todo] = {}
        for target, moves in todo:
            home = device_of(target, self._device)
            if not device_layer.is_accelerator(home):
                left.append((target, moves))
                continue
            parts = split(moves)
            staged.setdefault(home, []).append((target, parts.staged))
            left.append((target, Moves(None, [], [], parts.rest)))
        for home, part in staged.items():
            self._fill(self._layer(home), part)
        return left

    def check(self, targets: Iterable[Target]) -> None:
        """Compare tied weights, where devices do.

        Raises:
            ModelError: TIED_DIFFER.
        """
        jobs: dict[torch.device, list[Job]] = {}
        for target in targets:
            for job in check_jobs(target) if self._is_on_device(target) else ():
                jobs.setdefault(device_of(target, self._device), []).append(job)
        for home, part in jobs.items():
            with self._ring(self._layer(home), self._flat) as ring:
                self.bytes_read += ring.run(part)
                ring.check()

    def compares(self, target: Target, expr: Expr) -> bool:
        """Whether ``check`` does that comparison."""
        return self._is_on_device(target) and is_staged(expr)

    def _is_on_device(self, target: Target) -> bool:
        return device_layer.is_accelerator(device_of(target, self._device))

    def _layer(self, home: torch.device) -> DeviceLayer:
        layers = self._memory.layers
        if home not in layers:
            layers[home] = device_layer.layer_of(home)
        return layers[home]

    def _ring(self, layer: DeviceLayer, memory: Callable[[Target], torch.Tensor]) -> Ring:
        return Ring(layer, self._reader, self._size, memory, self._landed)

    def _flat(self, target: Target) -> torch.Tensor:
        return self._memory.of(target.storage, target.dtype)

    def _fill(self, layer: DeviceLayer, todo: Todo) -> None:
        constants = {id(target): moves.fills for target, moves in todo}

        def memory(target: Target) -> torch.Tensor:
            """Allocated at the target's turn, and its padding filled."""
            flat = self._flat(target)
            padding = constants.pop(id(target), ())
            if padding:
                with layer.home():
                    for view, value in padding:
                        strided(flat, view, target.dtype).fill_(value)
            return flat

        jobs = (j for t, moves in todo for j in jobs_of(t, moves, self._size.slot_bytes))
        with self._ring(layer, memory) as ring:
            self.bytes_read += ring.run(jobs)
            for target, moves in todo:
                if moves.fills:
                    memory(target)
            self.overflows += ring.overflows()


def _let_go(error: BaseException | None) -> None:
    """Locals of the frames an error went through hold memory that its reader wants back."""
    seen: list[BaseException] = []
    while error is not None and all(error is not each for each in seen):
        traceback.clear_frames(error.__traceback__)
        seen.append(error)
        error = error.__cause__ or error.__context__


@dataclass(frozen=True)
class StagedCost:
    """What the rings take from files, and how many bytes of host memory they hold."""

    survey: Survey
    ring_bytes: int


def staged_cost(
    todo: Sequence[tuple[Target, Moves]], reader: Reader, device: torch.device
) -> StagedCost:
    """What ``Stage`` will do for targets on accelerators; their moves as ``split`` staged them."""
    size = ring_size(reader.load_config, reader)
    rounds: dict[tuple[torch.device, bool], list[Job]] = {}
    for target, moves in todo:
        home = device_of(target, device)
        rounds.setdefault((home, False), []).extend(jobs_of(target, moves, size.slot_bytes))
        rounds.setdefault((home, True), []).extend(check_jobs(target))
    nbytes = requests = slots = 0
    for jobs in rounds.values():
        jobs.sort(key=lambda job: job.first)
        packed = list(fills(jobs, size.slot_bytes, size.slots_per_fill))
        more = survey_of(packed, reader)
        nbytes, requests = nbytes + more.nbytes, requests + more.requests
        slots = max(slots, sum(len(fill) for fill in packed))
    return StagedCost(Survey(nbytes, requests), min(slots, size.slots) * size.slot_bytes)
