"""Step 4: bytes go into parameter memory. The only step that touches weight bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from loadkit.distribute import Distribution
from loadkit.execution import Moves, Target, chunks, fetch_strips, files_of, moves_of, place_at
from loadkit.host_math import all_finite, decodes_into, same_bits
from loadkit.memory_errors import give_back
from loadkit.page_runs import Pages
from loadkit.readers.base import Extent, Reader
from loadkit.staged_read import Stage
from loadkit.staging import tied_error
from loadkit.staging_math import cast_source, may_overflow
from loadkit.storage_memory import StorageMemory
from loadkit.tracing.coverage import reads_own_memory
from loadkit.tracing.evaluate import ResultCache, evaluate, generate, strided
from loadkit.tracing.expressions import Const, Expr, Part, Src
from loadkit.tracing.program import walk
from loadkit.tracing.storage import FileLeaf, Storage
from loadkit.tracing.view import View
from loadkit.turns import Turn

__all__ = ["ReadResult", "read_targets", "read_turns"]

_FREED = 8 << 20  # bytes of modules' raw weights after which the C library gives them back

Landed = Callable[[int], None]
Ready = Callable[[Turn, dict[int, torch.Tensor]], None]


@dataclass
class ReadResult:
    """What the read step did. Bytes; ``overflows`` names tensors that a cast turned into inf."""

    bytes_read: int = 0
    aliased_bytes: int = 0
    overflows: list[str] = field(default_factory=list)


def read_targets(
    targets: Iterable[Target],
    reader: Reader,
    *,
    device: torch.device,
    alias: bool,
    landed: Landed | None = None,
    share: Distribution | None = None,
) -> tuple[ReadResult, dict[int, torch.Tensor]]:
    """Fill every target's memory in one turn; returns it by ``id(storage)``, flat.

    As ``read_turns``.
    """
    memory: dict[int, torch.Tensor] = {}

    def ready(_: Turn, filled: dict[int, torch.Tensor]) -> None:
        memory.update(filled)

    turns = [Turn(list(targets))]
    done = read_turns(turns, reader, ready, device=device, alias=alias, landed=landed, share=share)
    return done, memory


def read_turns(
    turns: Sequence[Turn],
    reader: Reader,
    ready: Ready,
    *,
    device: torch.device,
    alias: bool,
    landed: Landed | None = None,
    share: Distribution | None = None,
) -> ReadResult:
    """Fill every target's memory, turn by turn; ``ready`` gets each turn and its memory.

    In a turn the strips of its targets are read in file order, then what is computed. Tied weights
    are compared before the first turn is ready. With ``share`` the ranks of a group read for each
    other, and only what is this rank's own business goes that way.

    Args:
        turns: tied weights, and what is shared with other ranks, are in the first one.
        reader: moves the bytes.
        ready: called as ``ready(turn, memory)``, memory flat by ``id(storage)``; what it does not
            keep is given up.
        device: where memory is made.
        alias: targets may be views of their files.
        landed: told how many bytes have come.
        share: how ranks read for each other.

    Raises:
        ReadFailure: a file failed, ended early, or changed.
        ModelError: a cast turned a finite number into inf; tied weights differ.
        ResourceError: no memory.
    """
    run = _Run(reader, StorageMemory(device), landed)
    todos = [[(t, moves_of(t, alias=alias)) for t in turn.targets] for turn in turns]
    freed = 0
    with Stage(reader, run.memory, device, landed) as stage:
        run.save_old([item for todo in todos for item in todo])
        if share is not None:
            todos[0] = run.shared(share, todos[0])
        for turn, todo in zip(turns, todos, strict=True):
            run.turn(todo, stage)
            ready(turn, dict(run.memory.flat))
            if turn.module is not None:
                freed += sum(flat.nbytes for flat in run.memory.flat.values())
            run.memory.flat.clear()
            if freed >= _FREED:  # or what modules become would lie between what they were
                freed = 0
                give_back()
    run.result.bytes_read += stage.bytes_read
    run.result.overflows += stage.overflows
    targets = [target for todo in todos for target, _ in todo]
    for file in files_of(targets) if share is None else share.files(targets):
        file.check_unchanged()
    return run.result


def _last_uses(todo: list[tuple[Target, Moves]]) -> dict[int, list[int]]:
    """After which target the result of a whole operation (by id) is not wanted any more."""
    last: dict[int, int] = {}
    for at, (_, moves) in enumerate(todo):
        last |= dict.fromkeys(_origins([expr for _, expr in moves.computed]), at)
    for target, _ in todo:
        last |= dict.fromkeys(_origins([expr for _, expr, _ in target.checks]), len(todo))
    uses: dict[int, list[int]] = {}
    for origin, at in last.items():
        uses.setdefault(at, []).append(origin)
    return uses


def _origins(exprs: list[Expr]) -> Iterator[int]:
    for expr in exprs:
        for item in walk(expr):
            if isinstance(item, Part) and item.call.origin is not None:
                yield id(item.call.origin)


def _memory_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _first_offset(moves: Moves) -> tuple[str, int]:
    for _, expr in moves.computed:
        for src in _sources(expr):
            return src.leaf.info.file.name, src.leaf.info.offset
    return "", 0


def _first_place(moves: Moves) -> tuple[str, int]:
    """Where the first byte lies that is read into a target."""
    places = (place_at(leaf, strip) for leaf, strip in moves.strips)
    return min((place.file.name, place.offset) for place in places)


def _sources(expr: Expr) -> Iterator[Any]:
    return (e for e in walk(expr) if isinstance(e, Src) and isinstance(e.leaf, FileLeaf))


class _Run:
    def __init__(self, reader: Reader, memory: StorageMemory, landed: Landed | None) -> None:
        self.reader = reader
        self.memory = memory
        self.landed = landed
        self.result = ReadResult()
        self.cache: ResultCache = {}
        self.saved: dict[int, torch.Tensor] = {}
        self.held: dict[tuple[int, View], torch.Tensor] = {}  # regions that other ranks sent

    def shared(
        self, share: Distribution, todo: list[tuple[Target, Moves]]
    ) -> list[tuple[Target, Moves]]:
        """Fill targets together with the other ranks; gives those that each fills by itself."""
        alone = {id(target) for target in share.arrivals.alone}
        for target, moves in todo:
            if id(target) not in alone:
                self.fill(target, moves)
        self.result.bytes_read += share.fill(self, self.reader, self.landed)
        return [item for item in todo if id(item[0]) in alone]

    def turn(self, todo: list[tuple[Target, Moves]], stage: Stage) -> None:
        """Fill these targets, and compare those that are tied."""
        targets = [target for target, _ in todo]
        todo = stage.fill(todo)
        for target, moves in todo:
            self.alias(target, moves)
            self.fill(target, moves)
        self.strips(todo)
        todo.sort(key=lambda item: _first_offset(item[1]))
        last = _last_uses(todo)
        for at, (target, moves) in enumerate(todo):
            self.compute(target, moves)
            for origin in last.pop(at, ()):
                self.cache.pop(origin, None)
        stage.check(targets)
        for target in targets:
            self.check(target, stage)

    def memory_of(self, storage: Storage, dtype: torch.dtype) -> torch.Tensor:
        """A storage's memory, flat; allocated at its first use."""
        return self.memory.of(storage, dtype)

    def store_part(self, target: Target, view: View, expr: Expr) -> None:
        """Evaluate a part of a target into it."""
        self._store(target, self.memory.view(target, view), expr)

    def alias(self, target: Target, moves: Moves) -> None:
        """Make the file's mapping the target's memory, or pages of files some of its pages."""
        if moves.pages.runs:
            self.overlay(target, moves.pages)
        if moves.alias is None:
            return
        leaf, offset, nbytes = moves.alias
        flat = self.reader.view(leaf.info.file, offset, nbytes).view(target.dtype)
        self.memory.flat[id(target.storage)] = flat
        self.result.aliased_bytes += nbytes
        self.result.bytes_read += nbytes
        self._tell(nbytes)

    def overlay(self, target: Target, pages: Pages) -> None:
        """Make memory for a target in which pages of files stand."""
        flat = self.memory.with_pages(target.storage, target.dtype, pages).view(torch.uint8)
        for run in pages.runs:
            self.reader.overlay(run.file, run.offset, flat[run.target : run.target + run.nbytes])
            self._tell(run.nbytes)
        self.result.aliased_bytes += pages.nbytes
        self.result.bytes_read += pages.nbytes

    def fill(self, target: Target, moves: Moves) -> None:
        """Write constants (padding)."""
        for view, value in moves.fills:
            self.memory.view(target, view).fill_(value)

    def strips(self, todo: list[tuple[Target, Moves]]) -> None:
        """Read every strip of every target, in file order."""
        filled = [(target, moves) for target, moves in todo if moves.strips]
        if self.reader.joins:
            filled.sort(key=lambda item: _first_place(item[1]))
            self.memory.side_by_side([target for target, _ in filled])
        extents: list[Extent] = []
        for target, moves in filled:
            flat = self.memory.of(target.storage, target.dtype).view(torch.uint8)
            for leaf, strip in moves.strips:
                extents.append(_extent(leaf, strip, flat))
        self._read(extents)

    def _read(self, extents: list[Extent]) -> None:
        extents.sort(key=lambda e: (e.file.name, e.offset))
        self.result.bytes_read += self.reader.read(extents, self.landed)

    def compute(self, target: Target, moves: Moves) -> None:
        """Evaluate what is more than a copy, chunk by chunk."""
        own = [
            (view, expr)
            for view, expr in moves.computed
            if id(expr) not in self.saved and reads_own_memory(target.storage, expr)
        ]
        ready = [(view, self._evaluate(expr).clone()) for view, expr in own]
        for view, value in ready:
            self.memory.view(target, view).copy_(value)
        for view, expr in moves.computed:
            if any(view is mine for mine, _ in own):
                continue
            if id(expr) in self.saved:
                self.memory.view(target, view).copy_(self.saved.pop(id(expr)))
                continue
            for part_view, part in chunks(view, expr):
                self._store(target, self.memory.view(target, part_view), part)

    def save_old(self, todo: list[tuple[Target, Moves]]) -> None:
        """Keep what is made of a live module's memory, where that will be written before."""
        live = {_memory_of(t.storage.real) for t, _ in todo if t.storage.real is not None}
        for target, moves in todo if live else ():
            real = target.storage.real
            mine = set() if real is None else {_memory_of(real)}
            mixed = bool(moves.strips or moves.fills)
            for _, expr in moves.computed:
                used = {_memory_of(c.tensor) for c in walk(expr) if isinstance(c, Const)} & live
                if used - mine or (used and mixed):
                    self.saved[id(expr)] = self._evaluate(expr).clone()

    def _store(self, target: Target, into: torch.Tensor, expr: Expr) -> None:
        cast_from = cast_source(expr)
        source = expr if cast_from is None else cast_from
        if decodes_into(source, into):
            encoding = source.func.encoding
            encoding.decode_into(self._evaluate(source.args[0]), into)
            return
        value = self._evaluate(source)
        into.copy_(value)
        if cast_from is not None and may_overflow(value.dtype, into.dtype):
            if all_finite(into):
                return
            new_inf = torch.isinf(into).to("cpu") & ~torch.isinf(value)
            if bool(new_inf.any()):
                name = next((s.leaf.name for s in _sources(expr)), target.names[0])
                if name not in self.result.overflows:
                    self.result.overflows.append(name)

    def _evaluate(self, expr: Expr) -> torch.Tensor:
        """An expression's value; a region of a file that stands in it twice is read once."""
        recent: dict[tuple[int, View], torch.Tensor] = {}
        # No closure: a failed load's frames are emptied, and what a closure holds would stay.
        return evaluate(expr, partial(self._fetch_once, recent), self.cache)

    def _fetch_once(self, recent: dict[tuple[int, View], torch.Tensor], src: Src) -> torch.Tensor:
        key = (id(src.leaf), src.view)
        if key not in recent:
            recent[key] = self.fetch(src)
        return recent[key].view(src.dtype)

    def fetch(self, src: Src) -> torch.Tensor:
        """A leaf's region: a view of the mapping, or dense memory of its own."""
        leaf = src.leaf
        if not isinstance(leaf, FileLeaf):
            return generate(leaf, src)
        strips, shown = fetch_strips(src.view)
        held = self.held.get((id(leaf), src.view))
        if held is not None:
            return strided(held, shown, src.dtype)
        nbytes = sum(s.rows * s.row_bytes for s in strips)
        places = [place_at(leaf, strip) for strip in strips]
        aligned = leaf.info.offset % src.dtype.itemsize == 0
        if aligned and all(map(self.reader.maps, places)):
            for place in places:
                self.reader.bring(place)
            low, high = src.view.span()
            flat = self.reader.view(leaf.info.file, leaf.info.offset + low, high - low)
            view = View(
                src.view.size,
                src.view.stride,
                src.view.offset - low // src.view.itemsize,
                src.view.itemsize,
            )
            self.result.bytes_read += nbytes
            self._tell(nbytes)
            return strided(flat, view, src.dtype)
        flat = torch.empty(nbytes, dtype=torch.uint8)
        self._read([_extent(leaf, strip, flat) for strip in strips])
        return strided(flat, shown, src.dtype)

    def check(self, target: Target, stage: Stage) -> None:
        """Compare tied weights with the second tensor that holds them, where no device does.

        Raises:
            ModelError: TIED_DIFFER.
        """
        for view, expr, tensor in target.checks:
            if stage.compares(target, expr):
                continue
            for part_view, part in chunks(view, expr):
                self.compare_part(target, part_view, part, tensor)

    def compare_part(self, target: Target, view: View, expr: Expr, tensor: str) -> None:
        """Compare a part of a target with what it must equal.

        Raises:
            ModelError: TIED_DIFFER.
        """
        mine = self.memory.view(target, view)
        other = self._evaluate(expr).to(mine.device)
        if not same_bits(mine, other):
            raise tied_error(target, tensor)

    def _tell(self, nbytes: int) -> None:
        if self.landed is not None:
            self.landed(nbytes)


def _extent(leaf: FileLeaf, strip: Any, flat: torch.Tensor) -> Extent:
    end = strip.target + (strip.rows - 1) * strip.target_stride + strip.row_bytes
    return Extent(
        file=leaf.info.file,
        offset=leaf.info.offset + strip.source,
        row_bytes=strip.row_bytes,
        rows=strip.rows,
        file_stride=strip.source_stride,
        dest=flat[strip.target : end],
        dest_stride=strip.target_stride,
        tensor=leaf.name,
    )
