"""The reader ``nixl``: what replicas hold, by reads of their memory into a registered buffer.

The buffer lies where the parameters go. What arrives in it is copied to where it belongs, so that
memory is registered once and not for every destination.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeAlias

from loadkit.errors import LoadkitError, ReadError
from loadkit.readers.base import Extent, Place, Reader, Survey
from loadkit.readers.extents import check_extent
from loadkit.readers.windows import by_file
from loadkit_modelexpress.p2p.replica_file import ReplicaFile
from loadkit_modelexpress.p2p.transfer import Piece

if TYPE_CHECKING:
    import torch

    from loadkit.sources.base import File

__all__ = ["NixlReader"]

Items: TypeAlias = Sequence[Extent] | Sequence[Place]


class Part(NamedTuple):
    """``nbytes`` bytes of a row: from ``start`` of the file, ``at`` of the destination."""

    item: Extent | Place
    start: int
    at: int
    nbytes: int


class NixlReader(Reader):
    """Fills memory of the device that a load goes to, or of the host."""

    name: ClassVar[str] = "nixl"
    onto_device = True

    def reads_remote(self, file: File) -> bool:
        return isinstance(file, ReplicaFile)

    def survey(self, places: Iterable[Place]) -> Survey:
        nbytes = requests = 0
        for items in by_file(places):
            file = _replica(items[0])
            for batch in _batches(items, file.buffer_bytes):
                nbytes += sum(part.nbytes for part in batch)
                requests += 1
        return Survey(nbytes, requests)

    def read(self, extents: Sequence[Extent], landed: Callable[[int], None] | None = None) -> int:
        """Fill every destination; ``landed`` gets each transfer's bytes.

        Raises:
            ValueError: an extent does not fit its destination; nothing was read.
            ReadError: the transfer failed, or a file is not of a replica.
            LoadkitError: the replica is not reached.
        """
        for extent in extents:
            check_extent(extent, devices=True)
        total = 0
        for items in by_file(extents):
            file = _replica(items[0])
            for batch in _batches(items, file.buffer_bytes):
                total += self._bring(file, batch, items[0].dest.device, landed)
        return total

    def _bring(
        self,
        file: ReplicaFile,
        batch: Sequence[Part],
        device: torch.device,
        landed: Callable[[int], None] | None,
    ) -> int:
        link = file.link(device)
        pieces, into = [], 0
        for part in batch:
            one, address = file.at(part.start)
            pieces.append(Piece(address, into, part.nbytes, one.device))
            into += part.nbytes
        try:
            link.read(pieces)
        except LoadkitError as error:
            error.file, error.tensor = file.name, batch[0].item.tensor
            error.offset = batch[0].start
            raise
        for part, piece in zip(batch, pieces, strict=True):
            dest = part.item.dest  # type: ignore[union-attr]  # of a read they are extents
            there = dest.as_strided((part.nbytes,), (1,), dest.storage_offset() + part.at)
            there.copy_(link.buffer[piece.into : piece.into + piece.nbytes])
        link.wait()
        if landed is not None:
            landed(into)
        return into

    def close(self) -> None:
        """Links are closed with their files."""


def _replica(item: Extent | Place) -> ReplicaFile:
    file = item.file
    if not isinstance(file, ReplicaFile):
        raise ReadError(
            f"{file.name} is no replica's memory, and the reader 'nixl' reads nothing else",
            file=file.name,
            tensor=item.tensor,
            offset=item.offset,
            hint="name another reader: reader='pread'",
        )
    return file


def _batches(items: Items, size: int) -> Iterator[list[Part]]:
    """Parts that fill a buffer of ``size`` bytes together, in order."""
    batch: list[Part] = []
    room = size
    for part in _rows(items):
        done = 0
        while done < part.nbytes:
            take = min(room, part.nbytes - done)
            batch.append(Part(part.item, part.start + done, part.at + done, take))
            done, room = done + take, room - take
            if not room:
                yield batch
                batch, room = [], size
    if batch:
        yield batch


def _rows(items: Items) -> Iterator[Part]:
    for item in items:
        stride = item.dest_stride if isinstance(item, Extent) else item.row_bytes
        for row in range(item.rows):
            start = item.offset + row * item.file_stride
            yield Part(item, start, row * stride, item.row_bytes)
