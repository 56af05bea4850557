"""A file is downloaded once: in chunks side by side, gone on with where an earlier try broke off.

Chunks are written in place into a part file; a journal beside it says which are there, and of what
content. Only a process that holds the file's lock goes on with a part; the journal of another boot
does not count, since then nobody knows which writes reached the disk.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadkit.file_checks import show
from loadkit.network.answers import Pin
from loadkit.readers.threads import Task, run_tasks

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from loadkit.network.transfer import Transfers
    from loadkit_remote.cache import Kept

__all__ = ["CHUNK", "download"]

logger = logging.getLogger(__name__)

CHUNK = 16 << 20  # bytes of one request, and of what a broken download may lose
MAX_JOURNAL = 4 << 20  # bytes: 16 TiB of chunks


def download(
    kept: Kept, pin: Pin, transfers: Transfers, threads: int, landed: Callable[[int], None]
) -> None:
    """Have a file in its place. One process fetches it, others that want it wait.

    Raises:
        DownloadError: the server, or the way to it, failed; what arrived is kept for the next try.
        WriteError: no room, or no right to write.
    """
    if kept.is_there(pin):
        return
    kept.make_folders()
    with kept.locked(pin) as alone:
        if kept.is_there(pin):
            return
        logger.info("fetching %s, %d bytes", show(kept.name), pin.size)
        part = _Part(kept, pin, alone)
        try:
            part.fill(transfers, threads, landed)
            kept.finish(part.path, pin)
        except BaseException:
            if not alone:
                part.path.unlink(missing_ok=True)
            raise
        finally:
            part.close()
        kept.journal.unlink(missing_ok=True)


class _Part:
    """The part file of one download."""

    def __init__(self, kept: Kept, pin: Pin, alone: bool) -> None:
        self._kept = kept
        self._pin = pin
        self._lock = threading.Lock()
        own = "" if alone else f"-{os.getpid()}-{os.urandom(4).hex()}"
        self.path = kept.part.with_name(kept.part.name + own)
        self._journal = kept.journal if alone and _boot() else None
        self._done = self._known()
        self._number = -1
        try:
            self._number = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            missing = pin.size - CHUNK * len(self._done)
            if missing > shutil.disk_usage(self.path.parent).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.ftruncate(self._number, pin.size)
        except OSError as error:
            self.close()
            raise kept.cannot("write", error) from error

    def fill(self, transfers: Transfers, threads: int, landed: Callable[[int], None]) -> None:
        """Fetch the chunks that are not there, and have all of it on the disk."""
        if self._done:
            logger.info(
                "%s: %d chunk(s) are there from an earlier try",
                show(self._kept.name),
                len(self._done),
            )
            landed(min(self._pin.size, CHUNK * len(self._done)))
        tasks = self._tasks(transfers)
        run_tasks(tasks, max(1, min(threads, -(-self._pin.size // CHUNK))), landed)
        try:
            os.fsync(self._number)
        except OSError as error:
            raise self._kept.cannot("write", error) from error

    def _tasks(self, transfers: Transfers) -> Iterator[Task]:
        for number in range(-(-self._pin.size // CHUNK)):
            if number not in self._done:
                yield partial(self._chunk, transfers, number)

    def _chunk(self, transfers: Transfers, number: int) -> int:
        start = number * CHUNK
        end = min(start + CHUNK, self._pin.size)
        at = start

        def take(piece: Buffer) -> None:
            nonlocal at
            left = memoryview(piece).cast("B")
            while left:
                try:
                    written = os.pwrite(self._number, left, at)
                except OSError as error:
                    raise self._kept.cannot("write", error) from error
                at, left = at + written, left[written:]

        transfers.fetch(self._kept.name, start, end, self._pin, take)
        with self._lock:
            self._done.add(number)
            self._note()
        return end - start

    def _known(self) -> set[int]:
        """The chunks that an earlier try left, if they are of this content."""
        if self._journal is None or (self._pin.etag is None and self._pin.modified is None):
            return set()
        try:
            if self.path.stat().st_size != self._pin.size:
                return set()
            found: Any = json.loads(self._journal.read_bytes()[:MAX_JOURNAL])
            done = {int(number) for number in found["done"]}
        except (OSError, ValueError, TypeError, KeyError):
            return set()
        chunks = range(-(-self._pin.size // CHUNK))
        good = found.get("pin") == asdict(self._pin) and found.get("boot") == _boot()
        return done if good and all(number in chunks for number in done) else set()

    def _note(self) -> None:
        """Write down what is there. A journal that cannot be written only costs a later try."""
        if self._journal is None:
            return
        text = json.dumps(
            {"pin": asdict(self._pin), "boot": _boot(), "chunk": CHUNK, "done": sorted(self._done)}
        )
        new = self._journal.with_name(self._journal.name + ".new")
        try:
            new.write_text(text)
            new.replace(self._journal)
        except OSError as error:
            logger.debug("the journal of %s is not written: %s", show(self._kept.name), error)

    def close(self) -> None:
        number, self._number = self._number, -1
        if number >= 0:
            os.close(number)


@cache
def _boot() -> str:
    """What names this run of the operating system; empty where nothing does."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
