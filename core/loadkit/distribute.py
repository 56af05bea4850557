"""``distribute="broadcast"``: ranks read each byte once, and send it to those that need it.

Every rank has told what it needs, and all compute the same shares (``rank_shares``). In each round
a rank reads its part into a buffer, sends every other rank the bytes of it that that one needs, and
takes its own from the others'; the next part is read meanwhile. What has come is put in its place
at once, and what is computed from it is computed as soon as all of that is there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from loadkit.errors import DistributedError
from loadkit.execution import Target, files_of
from loadkit.rank_exchange import Exchange
from loadkit.rank_needs import Arrivals, Job, Landing, Region
from loadkit.rank_pieces import Piece, Sweeps, one_run
from loadkit.rank_shares import PAGE, Needs, Segment, Shares, in_order
from loadkit.readers.base import Extent, Place, Reader, Survey
from loadkit.readers.extents import copy_rows
from loadkit.tracing.expressions import Expr
from loadkit.tracing.storage import Storage
from loadkit.tracing.view import View

if TYPE_CHECKING:
    from loadkit.load_group import LoadGroup
    from loadkit.sources.base import File

__all__ = ["Distribution", "Filling"]


class Filling(Protocol):
    """What the read step does with bytes that are there."""

    held: dict[tuple[int, View], torch.Tensor]
    cache: dict[int, torch.Tensor]

    def memory_of(self, storage: Storage, dtype: torch.dtype) -> torch.Tensor:
        """A storage's memory, flat; allocated at its first use."""

    def store_part(self, target: Target, view: View, expr: Expr) -> None:
        """Compute a part of a target."""

    def compare_part(self, target: Target, view: View, expr: Expr, tensor: str) -> None:
        """Compare a part of a target with what it must equal."""


@dataclass
class Distribution:
    """How ranks share one load's reading, as one of them sees it.

    Attributes:
        arrivals: what this rank waits for.
        needs: what each rank needs, in rank order.
        shares: who reads what.
        bytes_sent, bytes_received: to and from other ranks, once ``fill`` is through.
    """

    group: LoadGroup
    rank: int
    arrivals: Arrivals
    needs: Sequence[Needs]
    shares: Shares
    bytes_sent: int = 0
    bytes_received: int = 0

    def survey(self, reader: Reader) -> Survey:
        """What this rank reads for all: bytes of files, and in how many requests."""
        nbytes = requests = 0
        for number in range(self.shares.rounds):
            segments = self.shares.part(number, self.rank)
            found = reader.survey([_place(segment) for _, segment in segments])
            nbytes, requests = nbytes + found.nbytes, requests + found.requests
        return Survey(nbytes, requests)

    @property
    def staging_bytes(self) -> int:
        """Memory for what is read ahead, sent and received, at most; bytes."""
        all_parts = min(self.shares.budget, self.shares.nbytes)
        part = all_parts // self.shares.ranks + PAGE
        return 2 * part + (2 * (all_parts + PAGE) if self.shares.ranks > 1 else 0)

    def fill(
        self, filling: Filling, reader: Reader, landed: Callable[[int], None] | None = None
    ) -> int:
        """Read this rank's part of everything, and fill this rank's targets; bytes read.

        Raises:
            RankFailed: another rank has failed.
            PeerLost: the connection to one broke off.
            LoadkitError: a read, or what the read step does with the bytes, failed.
        """
        run = _Fill(self, filling, reader, landed)
        group = self.group
        if self.shares.ranks == 1:
            return run.run(None)
        import torch.distributed as dist

        board = group.board
        if board is None:
            raise DistributedError(f"{self.shares.ranks} ranks cannot share a load that is alone")
        store = dist.PrefixStore(  # type: ignore[attr-defined]
            "exchange", group.store
        )
        exchange = Exchange(store, self.rank, board.names, timeout=board.timeout, check=group.check)
        try:
            return run.run(exchange)
        except BaseException as error:
            group.tell(error)  # before the others see the connections end
            raise
        finally:
            exchange.close()

    def files(self, targets: Sequence[Target]) -> list[File]:
        """The files that this rank reads: its parts, and for some targets by itself."""
        found = {file.name: file for file in files_of(list(targets))}
        for number in range(self.shares.rounds):
            for _, segment in self.shares.part(number, self.rank):
                found[segment.file.name] = segment.file
        return [found[name] for name in sorted(found)]


class _Fill:
    """One run through all rounds."""

    def __init__(
        self,
        share: Distribution,
        filling: Filling,
        reader: Reader,
        landed: Callable[[int], None] | None,
    ) -> None:
        self.share = share
        self.filling = filling
        self.reader = reader
        self.landed = landed
        self.bytes_read = 0
        self.ready: list[Job] = []
        self.after: list[Job] = []  # comparisons that wait for the targets
        self.uses: dict[int, int] = {}  # of whole operations' results
        self.mine = share.arrivals
        self.sweeps = Sweeps(
            [item.place for item in self.mine.every], [item.place for item in self.mine.late]
        )
        self.others = {
            rank: Sweeps(in_order([*each.first, *each.late]), each.late)
            for rank, each in enumerate(share.needs)
            if rank != share.rank
        }
        self.buffers: dict[str, torch.Tensor] = {}

    def run(self, exchange: Exchange | None) -> int:
        shares, me = self.share.shares, self.share.rank
        self._begin()
        slab = self._read(0)
        for number in range(shares.rounds):
            parts = [list(shares.part(number, rank)) for rank in range(shares.ranks)]
            wanted = [self._pieces(self.sweeps, self.mine.every, part) for part in parts]
            taken: dict[int, torch.Tensor] = {}
            if exchange is not None:
                sends = self._packed(slab, parts[me])
                taken = self._room({r: w for r, w in enumerate(wanted) if r != me})
                exchange.start(number, sends, taken)
                self.share.bytes_sent += sum(memory.numel() for memory in sends.values())
            ahead = self._read(number + 1)
            self._place(slab, wanted[me], packed=False)
            if exchange is not None:
                exchange.wait()
            for rank, memory in taken.items():
                self._place(memory, wanted[rank], packed=True)
                self.share.bytes_received += memory.numel()
            self._work()
            slab = ahead
        self._end()
        return self.bytes_read

    # -- bytes -------------------------------------------------------------------------------------

    def _read(self, number: int) -> torch.Tensor:
        """This rank's part of a round, its segments one after the other."""
        if number >= self.share.shares.rounds:
            return torch.empty(0, dtype=torch.uint8)
        segments = [each for _, each in self.share.shares.part(number, self.share.rank)]
        total = sum(each.end - each.start for each in segments)
        memory = self._buffer(f"part {number % 2}", total)
        extents, at = [], 0
        for segment in segments:
            size = segment.end - segment.start
            dest = memory[at : at + size]
            extents.append(
                Extent(segment.file, segment.start, size, 1, size, dest, size, segment.tensor)
            )
            at += size
        self.bytes_read += self.reader.read(extents, self.landed)
        return memory

    def _pieces(
        self, sweeps: Sweeps, landings: Sequence[Landing], part: Sequence[tuple[int, Segment]]
    ) -> list[Piece]:
        """What of a part this rank waits for."""
        return list(sweeps.pieces(part, self.share.shares.first_late))

    def _packed(
        self, slab: torch.Tensor, part: Sequence[tuple[int, Segment]]
    ) -> dict[int, torch.Tensor]:
        """What each other rank gets of this rank's part: a slice of it, or its pieces packed."""
        found: dict[int, torch.Tensor] = {}
        for rank, sweeps in self.others.items():
            pieces = list(sweeps.pieces(part, self.share.shares.first_late))
            total = sum(piece.part.rows * piece.part.nbytes for piece in pieces)
            if not total:
                continue
            start = one_run([(p.at, sweeps.places[p.number].file_stride, p.part) for p in pieces])
            if start is not None:
                found[rank] = slab[start : start + total]
                continue
            memory = found[rank] = self._buffer(f"to {rank}", total)
            into = memory.data_ptr()
            for piece in pieces:
                _, count, _, nbytes = piece.part
                stride = sweeps.places[piece.number].file_stride
                copy_rows(slab.data_ptr() + piece.at, stride, into, nbytes, nbytes, count)
                into += count * nbytes
        return found

    def _room(self, wanted: Mapping[int, Sequence[Piece]]) -> dict[int, torch.Tensor]:
        """Memory for what comes from each other rank."""
        sizes = {
            rank: sum(piece.part.rows * piece.part.nbytes for piece in pieces)
            for rank, pieces in wanted.items()
        }
        return {rank: self._buffer(f"from {rank}", size) for rank, size in sizes.items() if size}

    def _buffer(self, name: str, nbytes: int) -> torch.Tensor:
        """Memory that the same use of the round before has left."""
        memory = self.buffers.get(name)
        if memory is None or memory.numel() < nbytes:
            self.buffers.pop(name, None)
            memory = self.buffers[name] = torch.empty(nbytes + PAGE, dtype=torch.uint8)
        return memory[:nbytes]

    def _place(self, source: torch.Tensor, pieces: Sequence[Piece], *, packed: bool) -> None:
        """Put pieces where they belong; ``packed``: they lie one after the other in ``source``."""
        at = source.data_ptr()
        for piece in pieces:
            row, count, column, nbytes = piece.part
            landing = self.mine.every[piece.number]
            region = landing.region
            into = self._memory(region).data_ptr() + landing.at + row * landing.stride + column
            if packed:
                copy_rows(at, nbytes, into, landing.stride, nbytes, count)
                at += count * nbytes
            else:
                stride = landing.place.file_stride
                copy_rows(at + piece.at, stride, into, landing.stride, nbytes, count)
            region.left -= count * nbytes
            if not region.left:
                self._has_come(region)

    def _memory(self, region: Region) -> torch.Tensor:
        """A region's memory, flat uint8; allocated when the first of it comes."""
        if region.flat is None:
            target = region.target
            if target is not None:
                flat = self.filling.memory_of(target.storage, target.dtype)
                region.flat = flat.view(torch.uint8)
            else:
                region.flat = torch.empty(region.nbytes, dtype=torch.uint8)
        return region.flat

    # -- work --------------------------------------------------------------------------------------

    def _begin(self) -> None:
        for job in (*self.mine.jobs, *self.mine.checks):
            for origin in job.origins:
                self.uses[origin] = self.uses.get(origin, 0) + 1
            for region in job.regions:
                if not region.left:
                    self._hold(region)
            if not job.missing:
                (self.after if job.tensor else self.ready).append(job)
        self._work()

    def _has_come(self, region: Region) -> None:
        self._hold(region)
        for job in region.jobs:
            job.missing -= 1
            if not job.missing:
                (self.after if job.tensor else self.ready).append(job)
        region.jobs = []

    def _hold(self, region: Region) -> None:
        if isinstance(region.key, tuple):
            self.filling.held[region.key] = self._memory(region)

    def _work(self) -> None:
        """Do what can be done."""
        for job in self.ready:
            self.filling.store_part(job.target, job.view, job.expr)
            self._done(job)
        self.ready = []

    def _done(self, job: Job) -> None:
        """Let go of what nobody uses any more."""
        for region in job.regions:
            region.users -= 1
            if not region.users and isinstance(region.key, tuple):
                del self.filling.held[region.key]
                region.flat = None
        for origin in job.origins:
            self.uses[origin] -= 1
            if not self.uses[origin]:
                self.filling.cache.pop(origin, None)

    def _end(self) -> None:
        waiting = sum(bool(job.missing) for job in (*self.mine.jobs, *self.mine.checks))
        short = sum(item.region.left > 0 for item in self.mine.every)
        if waiting or short:
            raise DistributedError(
                f"{short} place(s) did not come whole, {waiting} computation(s) wait for them",
                hint="this is a fault of loadkit",
            )
        for job in self.after:
            self.filling.compare_part(job.target, job.view, job.expr, job.tensor or "")
            self._done(job)


def _place(segment: Segment) -> Place:
    size = segment.end - segment.start
    return Place(segment.file, segment.start, size, 1, size, segment.tensor)
