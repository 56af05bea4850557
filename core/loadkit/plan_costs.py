"""What a plan's targets cost with a reader: bytes to read, in how many requests, memory at most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from loadkit.device_layer import is_accelerator
from loadkit.execution import Moves, Target, chunks, fetch_strips, moves_of, place_at
from loadkit.page_runs import runs_left
from loadkit.readers import can_alias
from loadkit.readers.base import Place, Reader
from loadkit.readers.pages import PAGE
from loadkit.staged_read import device_of, staged_cost
from loadkit.staging_jobs import is_staged, split
from loadkit.tracing.expressions import Call, Const, Expr, Part, Src
from loadkit.tracing.pairing import Strip
from loadkit.tracing.program import children, walk
from loadkit.tracing.storage import FileLeaf
from loadkit.tracing.view import View
from loadkit.turns import Turn
from loadkit.unused_options import refuse_idle_ring

if TYPE_CHECKING:
    from loadkit.resolve import Job
    from loadkit.sources.base import File

__all__ = ["Bill", "Costs", "costs_of"]


class Costs(NamedTuple):
    """Bytes: of needed elements, to read, mapped of it, of parameters, of memory at most.

    ``requests``: reads after neighbours were joined.
    """

    needed: int
    read: int
    aliased: int
    parameters: int
    peak: int
    requests: int


def costs_of(turns: Sequence[Turn], files: Sequence[File], reader: Reader, job: Job) -> Costs:
    """What filling the targets reads and holds, as the read step will do it, turn by turn.

    Settles ``may_alias`` and ``may_overlay`` of each: its files allow it, it has its storage for
    itself, and the system can map so many pieces.
    """
    targets = [target for turn in turns for target in turn.targets]
    device = torch.device(job.device)
    aliases = reader.aliases and job.load_config.alias == "auto"
    allowed = {id(file): aliases and can_alias(file)[0] for file in files}
    _settle_aliases(targets, reader, allowed, device)
    bill = Bill(reader)
    mappings = runs_left()
    read = requests = ring_bytes = kept = peak = parameters = 0
    for turn in turns:
        staged: list[tuple[Target, Moves]] = []
        owned: dict[int, int] = {}
        for target in turn.targets:
            moves = moves_of(target, alias=aliases)
            if len(moves.pages.runs) > mappings:
                target.may_overlay = False
                moves = moves_of(target, alias=aliases)
            mappings -= len(moves.pages.runs)
            if is_accelerator(device_of(target, device)):
                parts = split(moves)
                staged.append((target, parts.staged))
                bill.need(parts.staged)
                moves = Moves(None, [], [], parts.rest)
            elif target.storage.real is None and moves.alias is None:
                nbytes = target.storage.numel * target.storage.itemsize
                own_pages = PAGE * (len(moves.pages.runs) + 1) if moves.pages.runs else 0
                owned[id(target.storage)] = nbytes - moves.pages.nbytes + own_pages
            bill.add(moves)
            _add_checks(bill, target, device)
        bill.close()
        ring = staged_cost(staged, reader, device)
        read, requests = read + ring.survey.nbytes, requests + ring.survey.requests
        ring_bytes = max(ring_bytes, ring.ring_bytes)
        raw, after = sum(owned.values()), turn.kept_bytes() if owned else 0
        # While a module is finished, what it was and what it becomes are both there.
        peak = max(peak, kept + raw + (after if turn.module is not None and after != raw else 0))
        kept += after if turn.module is not None else raw
        parameters += sum(target.nbytes for target in turn.targets if target.is_parameter)
        if turn.module is not None and owned:
            parameters += after - raw  # what its method makes of them
    rest = reader.survey_end()
    if not any(is_accelerator(device_of(target, device)) for target in targets):
        refuse_idle_ring(job.load_config)
    peak = max(peak, kept) + bill.staging + _constants(targets) + ring_bytes
    peak += reader.buffer_bytes()
    return Costs(
        bill.needed,
        bill.read + read + rest.nbytes,
        bill.aliased,
        parameters,
        peak,
        bill.requests + requests + rest.requests,
    )


def _settle_aliases(
    targets: list[Target], reader: Reader, allowed: dict[int, bool], device: torch.device
) -> None:
    """Which targets may be views of their files, or have pages of them."""
    users = Counter(id(target.storage) for target in targets)
    for target in targets:
        target.may_alias = (
            target.may_alias
            and not is_accelerator(device_of(target, device))
            and users[id(target.storage)] == 1
            and all(
                allowed[id(expr.leaf.info.file)]
                for _, expr in target.pieces
                if isinstance(expr, Src) and isinstance(expr.leaf, FileLeaf)
            )
        )
        target.may_overlay = target.may_alias and reader.overlays and target.storage.real is None


def _add_checks(bill: Bill, target: Target, device: torch.device) -> None:
    """Count what is read to compare tied weights."""
    on_device = is_accelerator(device_of(target, device))
    for view, expr, _ in target.checks:
        if on_device and is_staged(expr):
            bill.need(Moves(None, [], [], [(view, expr)]))
        else:
            bill.staging = max(bill.staging, bill.evaluated(expr))


def _constants(targets: list[Target]) -> int:
    """Bytes of real tensors that opaque loaders handed over."""
    return sum(
        {
            item.tensor.untyped_storage()._cdata: item.tensor.untyped_storage().nbytes()
            for target in targets
            for _, expr in target.pieces
            if not isinstance(expr, Src)
            for item in walk(expr)
            if isinstance(item, Const) and item.source is not None
        }.values()
    )


class Bill:
    """Adds up what moving targets takes. All but ``requests`` in bytes.

    ``staging`` is memory beside the targets' own, at most at once. Strips of all targets are
    surveyed together when the bill is closed, as they are read together.
    """

    def __init__(self, reader: Reader) -> None:
        self.needed = self.read = self.aliased = self.requests = self.staging = 0
        self._reader = reader
        self._strips: list[Place] = []
        # Whole operations that are computed already, and regions of files counted as needed.
        self._seen: set[Hashable] = set()

    def add(self, moves: Moves) -> None:
        """Count a target."""
        if moves.alias is not None:
            leaf, offset, nbytes = moves.alias
            self._reader.expect_view(leaf.info.file, offset, nbytes)
            self.needed += nbytes
            self.read += nbytes
            self.aliased += nbytes
            return
        for run in moves.pages.runs:
            self._reader.expect_view(run.file, run.offset, run.nbytes)
            self.needed += run.nbytes if self._once((id(run.file), run.offset, run.nbytes)) else 0
        self.read += moves.pages.nbytes
        self.aliased += moves.pages.nbytes
        for leaf, strip in moves.strips:
            self.needed += self._needed(leaf, strip)
            self._strips.append(place_at(leaf, strip))
        for view, expr in moves.computed:
            if isinstance(expr, Const):
                continue  # in memory already
            for part_view, part in chunks(view, expr):
                held = self.evaluated(part) + part_view.numel * part_view.itemsize
                self.staging = max(self.staging, held)

    def need(self, moves: Moves) -> None:
        """Count what a target needs of files where somebody else reads it."""
        for leaf, strip in moves.strips:
            self.needed += self._needed(leaf, strip)
        for view, expr in moves.computed:
            for _, part in chunks(view, expr):
                self.evaluated(part, read=False)

    def close(self) -> None:
        """Count the strips of every target."""
        self._survey(self._strips)
        self._strips = []

    def evaluated(self, expr: Expr, *, read: bool = True) -> int:
        """Count what evaluating an expression reads: each region once; gives its own memory.

        Without ``read`` somebody else reads: only what is needed counts.
        """
        staging = 0
        fetched: set[tuple[int, View]] = set()
        for item in self._walk_once(expr):
            if isinstance(item, Src) and isinstance(item.leaf, FileLeaf):
                region = (id(item.leaf), item.view)
                if region in fetched:
                    continue
                fetched.add(region)
                staging += self._fetch(item, item.leaf, region, read)
            elif isinstance(item, Call) and item.origin is not None:
                staging += item.origin.view.numel * item.origin.view.itemsize
        return staging

    def _fetch(self, src: Src, leaf: FileLeaf, region: Hashable, read: bool) -> int:
        """Count the read of a region; gives the memory that it is read into."""
        strips, _ = fetch_strips(src.view)
        distinct = src.view.itemsize * _distinct(src.view)
        dense = sum(strip.rows * strip.row_bytes for strip in strips)
        if distinct >= dense:
            self.needed += sum(self._needed(leaf, strip) for strip in strips)
        elif self._once(region):  # read with gaps
            self.needed += distinct
        if not read:
            return 0
        places = [place_at(leaf, strip) for strip in strips]
        aligned = leaf.info.offset % src.dtype.itemsize == 0
        if aligned and all(map(self._reader.maps, places)):
            self.read += dense  # computed from the map
            low, high = src.view.span()
            self._reader.expect_view(leaf.info.file, leaf.info.offset + low, high - low)
            return 0
        self._survey(places)
        return dense

    def _survey(self, places: Iterable[Place]) -> None:
        found = self._reader.survey(sorted(places, key=lambda p: (p.file.name, p.offset)))
        self.read += found.nbytes
        self.requests += found.requests

    def _needed(self, leaf: FileLeaf, strip: Strip) -> int:
        """Bytes of a strip of a file, if it is not counted yet."""
        place = (id(leaf), strip.source, strip.row_bytes, strip.rows, strip.source_stride)
        return strip.rows * strip.row_bytes if self._once(place) else 0

    def _once(self, key: Hashable) -> bool:
        """Whether this is the first time."""
        known = key in self._seen
        self._seen.add(key)
        return not known

    def _walk_once(self, expr: Expr) -> Iterator[Expr]:
        """Everything below an expression, whole operations that others share only once."""
        origin = expr.call.origin if isinstance(expr, Part) else None
        if origin is not None and not self._once(id(origin)):
            return
        yield expr
        for child in children(expr):
            yield from self._walk_once(child)


def _distinct(view: View) -> int:
    """Elements of a view, repeats not counted."""
    out = 1
    for n, s in zip(view.size, view.stride, strict=True):
        out *= n if s else 1
    return out
