"""Carrying out a draft: a hidden folder is filled, gone on with after a kill, and gets its name."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loadkit.conversion.draft import Draft, conversion_of
from loadkit.conversion.journal import JOURNAL, Journal, Progress, read_journal
from loadkit.conversion.writing import Written, remaining_bytes, write_files
from loadkit.errors import ChangedError, ModelError, ReadError, UsageError, WriteError
from loadkit.file_checks import show_path
from loadkit.progress import Progress as Bar
from loadkit.resumable_folder import ResumableFolder
from loadkit.save import file_blocks
from loadkit.saved_files import is_replaced

__all__ = ["carry_out"]

log = logging.getLogger("loadkit")

_SPARE = 1 << 20  # bytes of disk that a target's folders, journal and last files take, and more


def carry_out(
    draft: Draft,
    path: Path,
    source: str | os.PathLike[str],
    shown: bool,
    *,
    resume: bool,
    overwrite: bool,
) -> Written:
    """Everything into the folder; what makes it whole comes last, then its name.

    Args:
        draft: what to write.
        path: the folder.
        source: what is converted, for people.
        shown: whether progress is.
        resume, overwrite: as of ``loadkit.convert``.

    Raises:
        LoadkitError: see ``loadkit.convert``.
    """
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
                    for reader in draft.readers.values():
                        written.bytes_read += reader.end()
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
    except (KeyboardInterrupt, ReadError):
        folder.keep = folder.locked
        if folder.keep:
            log.warning(
                "what is written so far is kept in %s: --resume goes on with it",
                show_path(folder.staging),
            )
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
            for block in file_blocks(file):
                out.write(block)
    for name, data in draft.small.made.items():
        with folder.create(name) as out:
            out.write(data)
