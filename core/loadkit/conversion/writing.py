"""Writing planned files: read a little, write it, note it in the journal; go on after a kill."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from loadkit.conversion.files import PlannedFile
from loadkit.conversion.hashing import FileDigest
from loadkit.conversion.journal import Done, Journal, Mark, Progress
from loadkit.conversion.outputs import BUDGET, Slab, read_slabs, slabs_of
from loadkit.output_file import OutputFile
from loadkit.readers.base import Reader
from loadkit.resumable_folder import ResumableFolder
from loadkit.safetensors_writer import BLOCK

__all__ = ["Written", "identity_of", "remaining_bytes", "write_files"]

Landed = Callable[[int], None]


@dataclass
class Written:
    """What writing did. Bytes; ``done`` has the digests of every file.

    Attributes:
        bytes_written: of files, in this run.
        bytes_read: of the source, in this run.
        bytes_kept: of files, that earlier runs had written.
        overflows: checkpoint tensors whose finite numbers a cast made infinite.
    """

    bytes_written: int = 0
    bytes_read: int = 0
    bytes_kept: int = 0
    done: dict[str, Done] = field(default_factory=dict)
    overflows: dict[str, None] = field(default_factory=dict)


def write_files(
    folder: ResumableFolder,
    files: Sequence[PlannedFile],
    readers: Mapping[int, Reader],
    journal: Journal,
    progress: Progress,
    landed: Landed,
) -> Written:
    """Write what is not written yet, file after file.

    At any time about ``BUDGET`` bytes are in memory, or one tensor that cannot be cut.

    Args:
        folder: where they go.
        files: all of them.
        readers: rank -> the reader of its plan.
        journal: open, to note every step in.
        progress: what the journal said before.
        landed: is told bytes of files that are there.

    Raises:
        WriteError: the operating system refused a write.
        ReadFailure: the source could not be read, or changed.
    """
    written = Written()
    largest = max((file.size for file in files), default=0)
    arena = torch.empty(min(BUDGET, largest), dtype=torch.uint8)
    with ThreadPoolExecutor(2, "loadkit-hash") as pool:
        for file in files:
            done = progress.done.get(file.name)
            if done is not None and identity_of(folder.staging / file.name) == done.identity:
                folder.finished(file.name)
                written.bytes_kept += file.size
                landed(file.size)
            else:
                marks = progress.marks.get(file.name, [])
                reader = readers[file.rank]
                run = _Run(folder, file, reader, journal, written, landed, pool, arena)
                done = run.write(marks)
                journal.done(file.name, done)
            written.done[file.name] = done
    return written


class _Run:
    """One file."""

    def __init__(
        self,
        folder: ResumableFolder,
        file: PlannedFile,
        reader: Reader,
        journal: Journal,
        written: Written,
        landed: Landed,
        pool: ThreadPoolExecutor,
        arena: torch.Tensor,
    ) -> None:
        self.folder, self.file, self.reader = folder, file, reader
        self.journal, self.written, self.landed, self.pool = journal, written, landed, pool
        self.arena = arena
        self.path = folder.staging / file.name

    def write(self, marks: Sequence[Mark]) -> Done:
        """All of it, from where it was left."""
        digest = self._good_start(marks)
        kept = digest.size
        self.written.bytes_kept += kept
        self.landed(kept)
        name = self.file.name
        with self.folder.reopen(name, kept) if kept else self.folder.create(name) as out:
            if not kept:
                self._put(out, digest, self.file.layout.head, None)
            for batch in _batches(self.file, after=kept):
                self._move(batch, out, digest)
                self.journal.mark(name, Mark(out.size, digest.sha256))
        return Done(digest.sha256, digest.tensors(), identity_of(self.path) or (0, 0, 0))

    def _move(self, batch: Sequence[Slab], out: OutputFile, digest: FileDigest) -> None:
        """Read some slabs and write them; nothing of them is in memory afterwards."""
        flats, bytes_read, overflows = read_slabs(batch, self.reader, self.arena)
        self.written.bytes_read += bytes_read
        self.written.overflows.update(overflows)
        for slab, flat in zip(batch, flats, strict=True):
            self._put(out, digest, flat.numpy().data, slab.output.name)

    def _put(
        self, out: OutputFile, digest: FileDigest, data: memoryview | bytes, tensor: str | None
    ) -> None:
        digest.update(data, lambda: out.write(data, tensor))
        self.written.bytes_written += len(data)
        self.landed(len(data))

    def _good_start(self, marks: Sequence[Mark]) -> FileDigest:
        """The digest of what is right of a file that was begun; its size says how much that is.

        It is read again: what the journal knows may have been lost with the power.
        """
        good = FileDigest(self.file, self.pool)
        if identity_of(self.path) is None:
            return good
        running = good.copy()
        with self.path.open("rb", buffering=0) as opened:
            for mark in marks:
                while running.size < mark.end <= self.file.size:
                    data = opened.read(min(BLOCK, mark.end - running.size))
                    if not data:
                        break
                    running.update(data)
                if running.size != mark.end or running.sha256 != mark.sha256:
                    break
                good = running.copy()
        if not good.size:
            self.path.unlink()
        return good


def _batches(file: PlannedFile, *, after: int) -> Iterator[list[Slab]]:
    """The slabs that begin at byte ``after`` of the file or later, some at a time."""
    batch: list[Slab] = []
    filled, at = 0, len(file.layout.head)
    for output in file.outputs:
        for slab in slabs_of(output):
            at += slab.nbytes
            if at <= after:
                continue
            if batch and filled + slab.nbytes > BUDGET:
                yield batch
                batch, filled = [], 0
            batch.append(slab)
            filled += slab.nbytes
    if batch:
        yield batch


def identity_of(path: Path) -> tuple[int, int, int] | None:
    """A file's inode, size and time of change in nanoseconds; None where there is none."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def remaining_bytes(files: Sequence[PlannedFile], progress: Progress) -> int:
    """Bytes of files that a journal does not know of yet."""
    total = 0
    for file in files:
        marks = progress.marks.get(file.name, [])
        there = file.size if file.name in progress.done else marks[-1].end if marks else 0
        total += max(0, file.size - there)
    return total
