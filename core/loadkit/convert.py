"""Converting a checkpoint without a model in memory: ``loadkit.convert``.

It is the line with a writer at its end: the model is built on meta and its load is planned, and
what the plan says every tensor is made of is read and written, a little at a time. Nothing of the
target has its name before all of it is durable.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadkit.conversion.draft import Draft, conversion_of
from loadkit.conversion.drafts import How, make_draft
from loadkit.conversion.journal import JOURNAL, Journal, Progress, read_journal
from loadkit.conversion.writing import Written, remaining_bytes, write_files
from loadkit.errors import ChangedError, ModelError, ReadError, UsageError, WriteError
from loadkit.file_checks import show_path
from loadkit.progress import Progress as Bar
from loadkit.resumable_folder import ResumableFolder
from loadkit.safetensors_writer import BLOCK
from loadkit.saved_files import MAX_SHARD_BYTES, is_replaced

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loadkit.config import LoadConfig
    from loadkit.sources.base import File

__all__ = ["ConvertReport", "convert"]

_SPARE = 1 << 20  # bytes of disk that a target's folders, journal and last files take, and more


@dataclass(frozen=True)
class ConvertReport:
    """What was written. Sizes in bytes.

    Attributes:
        path: the folder.
        to: "safetensors" or "sharded_state".
        names: whose names the tensors have: "model" or "checkpoint", and why.
        files: its weight files in order.
        tensors: how many tensors they hold.
        total_size: bytes of the weight files.
        bytes_read: of the source, in this run.
        bytes_written: of weight files, in this run.
        bytes_kept: of weight files, that a killed run had written.
        topology: tp, pp and ep of a sharded target.
        casts: conversions: from, to, how many tensors.
        skipped: tensors of the source that are not in the target, with the reason.
        ties: tensor -> the names that share it and were not written again.
        copied: files that came from the source.
        not_copied: files of the source that could not be had, with the reason.
        warnings: what was allowed although it is unusual.
        seconds: wall time.
    """

    path: Path
    to: str
    names: str
    names_why: str
    files: tuple[str, ...]
    tensors: int
    total_size: int
    bytes_read: int
    bytes_written: int
    bytes_kept: int
    topology: dict[str, int] = field(default_factory=dict)
    casts: list[dict[str, Any]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    ties: dict[str, list[str]] = field(default_factory=dict)
    copied: tuple[str, ...] = ()
    not_copied: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able values."""
        return {**vars(self), "path": os.fspath(self.path), "files": list(self.files)}


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: str = "safetensors",
    names: str = "auto",
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    resume: bool = False,
    overwrite: bool = False,
    metadata: Mapping[str, str] | None = None,
    load_config: LoadConfig | None = None,
    **options: Any,
) -> ConvertReport:
    """Write any checkpoint that can be loaded as another one.

    A model is planned (all problems are found before a byte is written) and never in memory: about
    64 MiB of tensors at a time are read, cast or decoded, and written. ``max_shard_bytes`` and the
    names of files are the program's; names of tensors never become paths.

    Args:
        source: a folder, a file or a URI, in any format.
        target: the folder to make.
        to: "safetensors", a Hugging Face checkpoint; "sharded_state", every rank's parameters
            as they lie in its memory.
        names: "model", the names that Hugging Face gives the model's tensors; "checkpoint", the
            source's own, tensor by tensor, no model needed; "auto", the model's where its class
            is known.
        tp, pp, ep: the ranks of a sharded target.
        max_shard_bytes: most bytes of tensors in one file, where no single tensor is larger.
        resume: go on with what a killed conversion of the same source to the same target left.
        overwrite: replace what is at ``target``, and what a killed conversion left.
        metadata: strings for ``__metadata__`` of each file.
        load_config: how the source is read.
        **options: as of ``loadkit.load``: ``dtype``, ``load_format``, ``quantization``, ...

    Raises:
        PlanError: the source could not be loaded like that; all problems of all ranks.
        UsageError: EXISTS, something is at ``target``; UNFINISHED, a killed conversion left its
            work; QUANTIZED; an option cannot be.
        ConflictError: BUSY, another process converts to ``target``.
        ChangedError: what is to be resumed was begun from another source, or with other options;
            or a file of the source changed.
        WriteError: E_IO with ``errno``: too little space, say. What was at ``target`` is there.
        ReadFailure: the source could not be read.
    """
    started = time.perf_counter()
    folder = Path(os.path.realpath(Path(target).expanduser()))
    _check_place(folder, overwrite=overwrite)
    with ExitStack() as stack:
        draft, how = make_draft(
            stack,
            source,
            to=to,
            names=names,
            sizes={"tp": tp, "pp": pp, "ep": ep},
            most=max_shard_bytes,
            metadata=metadata or {},
            load_config=load_config,
            options=options,
        )
        written = _write(draft, folder, source, how.shown, resume=resume, overwrite=overwrite)
        return _report(draft, how, folder, written, time.perf_counter() - started)


def _check_place(folder: Path, *, overwrite: bool) -> None:
    """Refuse to replace what nobody said may be replaced.

    Raises:
        UsageError: EXISTS, or it is a file.
    """
    if folder.is_dir() and not overwrite:
        found = sorted(entry.name for entry in os.scandir(folder) if not _is_ours(entry.name))
        if found:
            raise UsageError(
                f"{show_path(folder)} is there and holds {len(found)} file(s)",
                code="EXISTS",
                file=str(folder),
                detail={"files": found[:20]},
                hint="give another folder, or say that this one is to be replaced (--overwrite)",
            )


def _is_ours(name: str) -> bool:
    return name.startswith(".loadkit-")


def _write(
    draft: Draft,
    path: Path,
    source: str | os.PathLike[str],
    shown: bool,
    *,
    resume: bool,
    overwrite: bool,
) -> Written:
    """Everything into the folder; what makes it whole comes last, then its name."""
    conversion = conversion_of(draft, path)
    with ResumableFolder(path, is_replaced) as folder:
        progress = _progress(folder, conversion, resume=resume, overwrite=overwrite)
        folder.clear(wanted={JOURNAL, *(file.name for file in draft.files)})
        _check_space(draft, path, progress)
        about = {"source": os.fspath(source), "bytes": draft.size, "started": time.time()}
        with _kept(folder):
            with Journal(folder.staging, conversion, about, keep=progress.size) as journal:
                with Bar(draft.size, shown=shown, what="converting") as bar:
                    written = write_files(
                        folder, draft.files, draft.readers, journal, progress, bar.landed
                    )
                    _check_overflows(draft, written)
                    _write_small(folder, draft)
                    draft.check_unchanged()
                    for name, data in draft.last(written.done).items():
                        with folder.create(name) as out:
                            out.write(data)
            journal.remove()
    return written


def _progress(
    folder: ResumableFolder, conversion: str, *, resume: bool, overwrite: bool
) -> Progress:
    """What a killed conversion left, if that may be gone on with; else nothing of it is there.

    Raises:
        UsageError: UNFINISHED, nobody said what to do with it.
        ChangedError: it is of another source, or other options.
    """
    left = read_journal(folder.staging)
    if not left.conversion:
        folder.clear()  # what a kill left before the first or after the last step
        return Progress()
    if resume and left.conversion == conversion:
        return left
    if overwrite:
        folder.clear()
        return Progress()
    folder.keep = True
    where = show_path(folder.staging)
    if resume:
        raise ChangedError(
            f"{where} is of another conversion: its source, its options or loadkit have changed",
            file=str(folder.staging),
            detail={"begun": left.about},
            hint="--overwrite begins anew",
        )
    there = sum(marks[-1].end for marks in left.marks.values())
    raise UsageError(
        f"a conversion to {show_path(folder.path)} was not finished: {where} holds {there} of "
        f"{left.about.get('bytes', '?')} bytes",
        code="UNFINISHED",
        file=str(folder.staging),
        detail={"begun": left.about, "bytes": there},
        hint="--resume goes on with it, --overwrite begins anew",
    )


@contextmanager
def _kept(folder: ResumableFolder) -> Iterator[None]:
    """Leave the unfinished work where going on with it makes sense: interrupted, or a bad read."""
    try:
        yield
    except (KeyboardInterrupt, ReadError) as error:
        folder.keep = folder.locked
        if folder.keep:
            error.add_note("run it again with --resume to go on from here")
        raise


def _check_space(draft: Draft, path: Path, progress: Progress) -> None:
    """Refuse what the disk cannot take.

    Raises:
        WriteError: ENOSPC.
    """
    there = next(place for place in (path.parent, *path.parents) if place.exists())
    weights = sum(file.size for file in draft.files)
    needed = remaining_bytes(draft.files, progress) + draft.size - weights + _SPARE
    free = shutil.disk_usage(there).free
    if needed > free:
        raise WriteError(
            f"{show_path(path)} needs {needed} bytes more, and {free} are free there",
            errno=errno.ENOSPC,
            file=str(path),
            detail={"needed": needed, "free": free},
            hint="free some space, or give a folder on another disk",
        )


def _check_overflows(draft: Draft, written: Written) -> None:
    """A dtype that nobody asked for must hold every number.

    Raises:
        ModelError: CAST_OVERFLOW.
    """
    plan = draft.contents[0].plan
    origin = draft.contents[0].origin
    config = origin.config.model_config if origin is not None else None
    if not written.overflows or plan is None or config is None:
        return
    if config.dtype_from != "requested":
        name = next(iter(written.overflows))
        raise ModelError(
            f"{len(written.overflows)} tensor(s) hold numbers that {plan.dtype} cannot: {name} "
            "became infinite",
            code="CAST_OVERFLOW",
            tensor=name,
            detail={"tensors": list(written.overflows)},
            hint="give dtype='float32' or 'bfloat16', or force this one with dtype=",
        )


def _write_small(folder: ResumableFolder, draft: Draft) -> None:
    for name, file in draft.small.files:
        with folder.create(name) as out:
            for block in _blocks(file):
                out.write(block)
    for name, data in draft.small.made.items():
        with folder.create(name) as out:
            out.write(data)


def _blocks(file: File) -> Iterator[bytes]:
    for start in range(0, file.size, BLOCK):
        yield file.read(start, min(BLOCK, file.size - start))


def _report(
    draft: Draft, how: How, folder: Path, written: Written, seconds: float
) -> ConvertReport:
    casts: dict[tuple[str, str], int] = {}
    skipped: dict[str, str] = {}
    ties: dict[str, list[str]] = {}
    warnings = [f"{name}: some numbers became infinite" for name in written.overflows]
    for contents in draft.contents:
        casts.update(contents.casts)
        skipped.update(contents.skipped)
        ties.update(contents.ties)
        notes = contents.plan.notes if contents.plan is not None else ()
        warnings += [note.message for note in notes if note.message not in warnings]
    top = draft.topology
    return ConvertReport(
        path=folder,
        to=how.to,
        names=how.names,
        names_why=how.why,
        files=tuple(file.name for file in draft.files),
        tensors=sum(len(file.outputs) for file in draft.files),
        total_size=sum(file.size for file in draft.files),
        bytes_read=written.bytes_read,
        bytes_written=written.bytes_written,
        bytes_kept=written.bytes_kept,
        topology={"tp": top.tp, "pp": top.pp, "ep": top.ep},
        casts=[{"from": a, "to": b, "tensors": n} for (a, b), n in casts.items()],
        skipped=skipped,
        ties=ties,
        copied=tuple(name for name, _ in draft.small.files),
        not_copied=draft.small.not_copied,
        warnings=warnings,
        seconds=seconds,
    )
