"""One file's bytes from the hub into its cache: resumed, hashed, put in place in one step."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadkit.errors import IntegrityError
from loadkit.file_checks import show
from loadkit_hub.cache import RepoCache, cannot_write
from loadkit_hub.listing import Entry
from loadkit_hub.locks import locked

if TYPE_CHECKING:
    from typing_extensions import Buffer

    Stream = Callable[[int, Callable[[Buffer], object]], object]

__all__ = ["fetch_blob"]

logger = logging.getLogger(__name__)

_STEP = 8 << 20  # bytes hashed at a time
_TRIES = 2  # downloads of a file whose digest is wrong: what was resumed may be to blame


def fetch_blob(
    cache: RepoCache,
    commit: str,
    entry: Entry,
    stream: Stream,
    seconds: float,
    landed: Callable[[int], None],
) -> None:
    """Have one file in the cache, whichever process fetches it.

    What is there is looked at again once the lock is held.

    Args:
        cache: of the repository.
        commit: whose file it is.
        entry: the file.
        stream: hands over its bytes from one byte on, in order and each once.
        seconds: how long another process may stand still while it fetches this file.
        landed: told the bytes that are there.

    Raises:
        IntegrityError: what came is not what the hub's listing says.
        WriteError: there is no room, or no right to write.
        LoadkitError: the hub, as of ``stream``.
    """
    blob = cache.blob(entry.oid)
    partial = blob.with_name(f"{blob.name}.loadkit.incomplete")
    try:
        with locked(cache.lock(entry.oid), seconds, lambda: _size(partial)) as held:
            if cache.has(commit, entry):
                landed(entry.size)
                return
            if _size(blob) != entry.size:
                if not held:  # somebody may write to the common one
                    partial = blob.with_name(f"{blob.name}.{secrets.token_hex(8)}.incomplete")
                _download(entry, stream, partial, blob, landed, keep=held)
            else:
                landed(entry.size)
            cache.link(commit, entry)
    except OSError as error:
        raise cannot_write(error, cache.root) from error


def _size(path: Path) -> int:
    """A file's size in bytes; -1 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _download(
    entry: Entry,
    stream: Stream,
    partial: Path,
    blob: Path,
    landed: Callable[[int], None],
    *,
    keep: bool,
) -> None:
    blob.parent.mkdir(parents=True, exist_ok=True)
    done = False
    try:
        for attempt in range(_TRIES):
            resumed = _fill(entry, stream, partial, landed)
            if resumed is None:
                break
            logger.warning("%s is not what the hub says it is: fetched again", show(entry.name))
            if attempt + 1 == _TRIES or not resumed:
                raise _damaged(entry)
        os.replace(partial, blob)  # noqa: PTH105
        done = True
    finally:
        if not done and not keep:
            partial.unlink(missing_ok=True)


def _fill(
    entry: Entry, stream: Stream, partial: Path, landed: Callable[[int], None]
) -> bool | None:
    """Go on with a partial file to its end. None: its digest is right; else whether it was resumed.

    A file with a wrong digest is removed.
    """
    digest: Any
    if entry.sha256:
        digest = hashlib.sha256()
    else:
        digest = hashlib.sha1(b"blob %d\0" % entry.size, usedforsecurity=False)
    with partial.open("ab+") as file:
        start = file.seek(0, os.SEEK_END)
        if start > entry.size:
            file.truncate(0)
            start = 0
        file.seek(0)
        for at in range(0, start, _STEP):
            digest.update(file.read(min(_STEP, start - at)))
        _room_for(entry.size - start, partial.parent)
        landed(start)

        def take(data: Buffer) -> None:
            file.write(data)
            digest.update(data)
            landed(memoryview(data).nbytes)

        if start:
            logger.info("%s goes on at byte %d of %d", show(entry.name), start, entry.size)
        try:
            stream(start, take)
        finally:
            file.flush()
        os.fsync(file.fileno())
    if digest.hexdigest() == entry.oid:
        return None
    partial.unlink()
    landed(-entry.size)
    return start > 0


def _room_for(nbytes: int, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise OSError(errno.ENOSPC, f"{nbytes} bytes are to come, {free} are free", str(folder))


def _damaged(entry: Entry) -> IntegrityError:
    kind = "SHA-256" if entry.sha256 else "git's SHA-1"
    return IntegrityError(
        f"{show(entry.name)} came from the hub with another {kind} than the hub lists",
        file=entry.name,
        detail={"expected": entry.oid, "size": entry.size},
        hint="fetch it again; if it stays so, the hub or a proxy before it is at fault",
    )
