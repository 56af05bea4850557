"""Writing planned files: read a little, write it, note it in the journal; go on after a kill."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from loadkit.conversion.files import PlannedFile
from loadkit.conversion.journal import Done, Journal, Mark, Progress
from loadkit.conversion.outputs import BUDGET, Slab, read_slabs, slabs_of
from loadkit.readers.base import Reader
from loadkit.resumable_folder import ResumableFolder
from loadkit.safetensors_writer import BLOCK

__all__ = ["Written", "identity_of", "remaining_bytes", "write_files"]

Landed = Callable[[int], None]


@dataclass
class Written:
    """What writing did. Bytes; ``sha256`` by file.

    Attributes:
        bytes_written: of files, in this run.
        bytes_read: of the source, in this run.
        bytes_kept: of files, that earlier runs had written.
        overflows: checkpoint tensors whose finite numbers a cast made infinite.
    """

    bytes_written: int = 0
    bytes_read: int = 0
    bytes_kept: int = 0
    sha256: dict[str, str] = field(default_factory=dict)
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
    for file in files:
        path = folder.staging / file.name
        done = progress.done.get(file.name)
        if done is not None and identity_of(path) == done.identity and path.is_file():
            folder.finished(file.name)
            written.sha256[file.name] = done.sha256
            written.bytes_kept += file.size
            landed(file.size)
            continue
        sha256 = _write(folder, file, readers[file.rank], journal, progress, written, landed)
        found = identity_of(path)
        if found is not None:
            journal.done(file.name, Done(sha256, found))
        written.sha256[file.name] = sha256
    return written


def _write(
    folder: ResumableFolder,
    file: PlannedFile,
    reader: Reader,
    journal: Journal,
    progress: Progress,
    written: Written,
    landed: Landed,
) -> str:
    """One file, from where it was left; returns its sha256."""
    kept, sha = _good_start(folder.staging / file.name, file, progress.marks.get(file.name, []))
    written.bytes_kept += kept
    landed(kept)
    out = folder.reopen(file.name, kept) if kept else folder.create(file.name)
    with out:
        if not kept:
            sha.update(file.layout.head)
            out.write(file.layout.head)
            written.bytes_written += len(file.layout.head)
        for batch in _batches(file, after=kept):
            flats, bytes_read, overflows = read_slabs(batch, reader)
            written.bytes_read += bytes_read
            written.overflows.update(overflows)
            for slab, flat in zip(batch, flats, strict=True):
                data = flat.numpy().data
                out.write(data, slab.output.name)
                sha.update(data)
                written.bytes_written += slab.nbytes
                landed(slab.nbytes)
            journal.mark(file.name, Mark(out.size, sha.hexdigest()))
    return sha.hexdigest()


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


def _good_start(path: Path, file: PlannedFile, marks: Sequence[Mark]) -> tuple[int, hashlib._Hash]:
    """How many bytes of a file that was begun are right, and the hash of them.

    They are read again: what the journal knows may have been lost with the power.
    """
    good, sha = 0, hashlib.sha256()
    found = identity_of(path)
    if found is None or not marks:
        if found is not None:
            path.unlink()
        return good, sha
    running = hashlib.sha256()
    at = 0
    with path.open("rb", buffering=0) as opened:
        for mark in marks:
            while at < mark.end:
                data = opened.read(min(BLOCK, mark.end - at))
                if not data:
                    break
                running.update(data)
                at += len(data)
            if at != mark.end or mark.end > file.size or running.hexdigest() != mark.sha256:
                break
            good, sha = at, running.copy()
    if not good:
        path.unlink()
    return good, sha


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
