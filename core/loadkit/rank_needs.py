"""What one rank needs of the files, and what is to be done when which of it has come.

Bytes that are parameters as they are land in the parameter's memory. Bytes that something is
computed from land in a region of memory that lives until the last computation that uses it is done;
those are cut as the read step cuts them, into pieces of a few MiB.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from loadkit.device_layer import is_accelerator
from loadkit.execution import Moves, Target, chunks, fetch_strips, moves_of
from loadkit.rank_shares import Needs, in_order
from loadkit.readers.base import Place
from loadkit.staged_read import device_of
from loadkit.tracing.coverage import is_kept
from loadkit.tracing.expressions import Const, Expr, Filled, Part, Src
from loadkit.tracing.pairing import Strip
from loadkit.tracing.program import walk
from loadkit.tracing.storage import FileLeaf
from loadkit.tracing.view import View

if TYPE_CHECKING:
    from loadkit.sources.base import File

__all__ = ["Arrivals", "Job", "Landing", "Region", "decode", "encode"]

Key = tuple[int, View] | int


@dataclass(eq=False)
class Region:
    """Memory that bytes land in: a target's own, or some that lives for a while.

    ``left`` bytes are still to come; ``users`` jobs still need it.
    """

    key: Key
    target: Target | None = None
    nbytes: int = 0
    left: int = 0
    users: int = 0
    jobs: list[Job] = field(default_factory=list)
    flat: torch.Tensor | None = None


@dataclass(eq=False)
class Job:
    """A computation: a part of a target, or what a part must equal (``tensor`` names that).

    ``missing`` regions have not come yet. ``origins``: whole operations whose result it uses.
    """

    target: Target
    view: View
    expr: Expr
    tensor: str | None = None
    regions: list[Region] = field(default_factory=list)
    missing: int = 0
    origins: frozenset[int] = frozenset()


@dataclass(slots=True, eq=False)
class Landing:
    """A place of a file and where in a region it lands: row i at byte ``at + i * stride``."""

    place: Place
    region: Region
    at: int
    stride: int


class Arrivals:
    """Everything that one rank waits for.

    Attributes:
        landings: in the order of their places; those of ``late`` only serve comparisons.
        jobs: what is computed, and after all of it, what is compared.
        alone: targets that are made of what their module held before: each rank reads for
            those by itself.
    """

    def __init__(self, targets: Iterable[Target], device: torch.device) -> None:
        self._device = device
        self._regions: dict[Key, Region] = {}
        self._late = False
        first: list[Landing] = []
        late: list[Landing] = []
        self._landings = first
        self.jobs: list[Job] = []
        self.checks: list[Job] = []
        self.alone: list[Target] = []
        targets = list(targets)
        live = {_memory_of(t.storage.real) for t in targets if t.storage.real is not None}
        for target in targets:
            moves = moves_of(target, alias=False)
            if live and _uses(moves, live):
                self.alone.append(target)
            else:
                self._add(target, moves)
        self._landings = late
        for target in targets:
            if target not in self.alone:
                for view, expr, tensor in target.checks:
                    self._add_jobs(self.checks, target, view, expr, tensor)
        self.first = _in_order(first)
        self.late = _in_order(late)
        self.every = _in_order([*first, *late])

    @property
    def needs(self) -> Needs:
        """The places alone."""
        return Needs([item.place for item in self.first], [item.place for item in self.late])

    def _add(self, target: Target, moves: Moves) -> None:
        if is_accelerator(device_of(target, self._device)):
            computed: list[tuple[View, Expr]] = [
                (view, expr)
                for view, expr in target.pieces
                if not isinstance(expr, Filled) and not is_kept(target.storage, expr)
            ]
            moves = moves._replace(strips=[], computed=computed)
        if moves.strips:
            region = Region(id(target), target)
            for leaf, strip in moves.strips:
                self._land(region, leaf, strip)
        for view, expr in moves.computed:
            self._add_jobs(self.jobs, target, view, expr, None)

    def _add_jobs(
        self, jobs: list[Job], target: Target, view: View, expr: Expr, tensor: str | None
    ) -> None:
        for part_view, part in chunks(view, expr):
            items = list(walk(part))
            origins = {
                id(item.call.origin)
                for item in items
                if isinstance(item, Part) and item.call.origin is not None
            }
            job = Job(target, part_view, part, tensor, origins=frozenset(origins))
            for key, src in _regions_of(items):
                region = self._regions.get(key) or self._fetched(key, src)
                region.users += 1
                job.regions.append(region)
                if region.left:
                    region.jobs.append(job)
                    job.missing += 1
            jobs.append(job)

    def _fetched(self, key: Key, src: Src) -> Region:
        region = self._regions[key] = Region(key)
        leaf = src.leaf
        if isinstance(leaf, FileLeaf):
            strips, _ = fetch_strips(src.view)
            region.nbytes = sum(strip.rows * strip.row_bytes for strip in strips)
            for strip in strips:
                self._land(region, leaf, strip)
        return region

    def _land(self, region: Region, leaf: FileLeaf, strip: Strip) -> None:
        nbytes = strip.rows * strip.row_bytes
        if not nbytes:
            return
        info = leaf.info
        offset = info.offset + strip.source
        stride = strip.source_stride if strip.rows > 1 else strip.row_bytes
        place = Place(info.file, offset, strip.row_bytes, strip.rows, stride, leaf.name)
        self._landings.append(Landing(place, region, strip.target, strip.target_stride))
        region.left += nbytes


def _regions_of(items: Sequence[Expr]) -> Iterator[tuple[Key, Src]]:
    """Each region of a file among some expressions, once."""
    found: dict[Key, Src] = {}
    for item in items:
        if isinstance(item, Src) and isinstance(item.leaf, FileLeaf):
            found.setdefault((id(item.leaf), item.view), item)
    return iter(found.items())


def _in_order(landings: Sequence[Landing]) -> list[Landing]:
    """Landings in the order in which ``in_order`` has their places."""
    places = in_order([item.place for item in landings])
    waiting: dict[Place, list[Landing]] = {}
    for item in landings:
        waiting.setdefault(item.place, []).append(item)
    return [waiting[place].pop(0) for place in places]


def _uses(moves: Moves, live: set[int]) -> bool:
    """Whether anything is computed from memory that is being filled."""
    return any(
        isinstance(item, Const) and _memory_of(item.tensor) in live
        for _, expr in moves.computed
        for item in walk(expr)
    )


def _memory_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def encode(needs: Needs) -> bytes:
    """Needs as bytes that another rank reads with ``decode``."""
    files: dict[str, int] = {}
    tensors: dict[str, int] = {}
    rows = [
        (
            files.setdefault(place.file.name, len(files)),
            tensors.setdefault(place.tensor, len(tensors)),
            *place[1:5],
        )
        for place in (*needs.first, *needs.late)
    ]
    head = {"files": list(files), "tensors": list(tensors), "first": len(needs.first)}
    table = np.array(rows, dtype="<i8").reshape(-1, 6)
    return json.dumps(head).encode() + b"\n" + table.tobytes()


def decode(data: bytes, open_file: Callable[[str], File]) -> Needs:
    """What ``encode`` wrote, with this rank's own open files."""
    text, _, rest = data.partition(b"\n")
    head = json.loads(text)
    files = [open_file(name) for name in head["files"]]
    tensors = head["tensors"]
    places = [
        Place(files[file], offset, row_bytes, rows, stride, tensors[tensor])
        for file, tensor, offset, row_bytes, rows, stride in np.frombuffer(rest, dtype="<i8")
        .reshape(-1, 6)
        .tolist()
    ]
    return Needs(places[: head["first"]], places[head["first"] :])
