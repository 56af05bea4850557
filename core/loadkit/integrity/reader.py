"""A reader around another one: it verifies what passes through it, and the rest at the end.

A unit (see ``digests``) of which one call wants at least half is read whole into a buffer, hashed
there, and only then handed on. What is wanted of other units is read as without verification;
those units, the headers', and all that is used through a mapping are hashed when everything else
is done: from the mapping where there is one, else read once more, whole. So every byte of a unit
that was used is verified before a model is handed out, whoever read it, and what that reads
follows from the plan alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import torch

from loadkit.integrity.digests import BLOCK, FileDigests, NamesIn, mismatch
from loadkit.integrity.tally import Tally
from loadkit.integrity.units import Check, chunks, outside, part_of
from loadkit.readers.base import Extent, Place, Reader, Survey
from loadkit.readers.extents import buffer_at, check_extent
from loadkit.readers.threads import Task, run_tasks, threads_for
from loadkit.readers.windows import (
    by_file,
    cut,
    meeting,
    merged,
    owner_at,
    place_of,
    scatter,
    spans,
)

if TYPE_CHECKING:
    from loadkit.sources.base import File

__all__ = ["VerifyingReader"]

Landed = Callable[[int], None]


class VerifyingReader(Reader):
    """Another reader's bytes, compared with digests as they pass.

    Args:
        inner: who reads; used from several threads at once.
        digests: by ``id(file)``; files that are not in it are read as without verification.
        names: finds tensors, for errors.
        tally: what is verified so far; readers of one load share it.
        keep: keeps the digests of a file for later loads; its answer is a warning, or empty.

    Attributes:
        compared, recorded: bytes that were held against a digest, and that had none.
    """

    def __init__(
        self,
        inner: Reader,
        digests: Mapping[int, FileDigests],
        names: NamesIn,
        tally: Tally,
        keep: Callable[[FileDigests], str],
    ) -> None:
        super().__init__(inner.load_config)
        self.inner = inner
        self.name = inner.name  # type: ignore[misc]  # a layer, not a reader with its own name
        self.aliases = inner.aliases  # type: ignore[misc]
        self.overlays = inner.overlays  # type: ignore[misc]
        self.concurrent = inner.concurrent  # type: ignore[misc]
        self.remarks = inner.remarks
        self.compared = self.recorded = 0
        self._digests = digests
        self._names = names
        self._keep = keep
        self._tally = tally
        self._planned = Tally()
        self._apart: list[tuple[FileDigests, range]] = []
        self._lock = threading.Lock()
        self._buffers: list[torch.Tensor] = []
        self._threads = threads_for(inner.load_config, most=8) if inner.concurrent else 1

    def touch(self, found: FileDigests, units: range) -> None:
        """Have units verified at the end whose bytes do not pass through here (a header)."""
        self._apart.append((found, units))
        self._tally.touch(found, units)

    def buffer_bytes(self) -> int:
        return self._threads * BLOCK + self.inner.buffer_bytes()

    # -- the plan --------------------------------------------------------------------------------

    def survey(self, places: Iterable[Place]) -> Survey:
        total = Survey(0, 0)
        rest: list[Place] = []
        for part in by_file(places):
            found = self._digests.get(id(part[0].file))
            if found is None:
                rest += part
                continue
            staged = self._staged(found, part, self._planned)
            rest += [place_of(item, piece) for item, piece in outside(found, staged, part)]
            for unit in staged:
                self._planned.verify(found, unit)
                total = _sum(total, self._unit_survey(found, unit))
        return _sum(total, self.inner.survey(_sorted(rest)))

    def maps(self, place: Place) -> bool:
        return self.inner.maps(place)

    def bring(self, place: Place) -> None:
        self.inner.bring(place)

    def expect_view(self, file: File, offset: int, nbytes: int) -> None:
        self.inner.expect_view(file, offset, nbytes)
        found = self._digests.get(id(file))
        if found is not None:
            self._planned.view(found, offset, offset + nbytes)

    def survey_end(self, apart: Iterable[tuple[FileDigests, range]] | None = None) -> Survey:
        """As any reader's; ``apart``: what is touched in place of what ``touch`` was told."""
        total = self.inner.survey_end()
        for each in self._apart if apart is None else apart:
            self._planned.touch(*each)
        for found in self._digests.values():
            left = self._planned.left(found)
            if self._planned.is_mapped(found):
                total = _sum(total, Survey(self._planned.unseen(found, left), 0))
                continue
            for unit in left:
                total = _sum(total, self._unit_survey(found, unit))
        self._planned = Tally()
        return total

    def _unit_survey(self, found: FileDigests, unit: int) -> Survey:
        places = (Place(found.file, a, b - a, 1, b - a) for a, b in chunks(*found.unit(unit)))
        return reduce(_sum, (self.inner.survey([place]) for place in places), Survey(0, 0))

    # -- the load --------------------------------------------------------------------------------

    def read(self, extents: Sequence[Extent], landed: Landed | None = None) -> int:
        """Fill every destination; what is verified in passing lands only if it is right.

        Raises:
            IntegrityError: a unit's digest is another one. Units of one chunk did not land.
            LoadkitError: as the inner reader.
        """
        for extent in extents:
            check_extent(extent)
        self.inner.streaming = self.streaming
        tasks: list[Task] = []
        rest: list[Extent] = []
        for part in by_file(extents):
            found = self._digests.get(id(part[0].file))
            if found is None:
                rest += part
                continue
            staged = self._staged(found, part, self._tally)
            rest += [part_of(item, piece) for item, piece in outside(found, staged, part)]
            windows = map(found.unit, staged)
            for unit, (_, _, inside) in zip(staged, meeting(part, windows), strict=True):
                tasks.append(partial(self._unit, found, unit, inside, landed))
        moved = self._run(tasks)
        return moved + (self.inner.read(_sorted(rest), landed) if rest else 0)

    def view(self, file: File, offset: int, nbytes: int) -> torch.Tensor:
        """A view of the mapping; it is verified at the end."""
        shown = self.inner.view(file, offset, nbytes)
        found = self._digests.get(id(file))
        if found is not None:
            self._tally.view(found, offset, offset + nbytes)
        return shown

    def overlay(self, file: File, offset: int, into: torch.Tensor) -> None:
        """Pages of the mapping; they are verified at the end."""
        self.inner.overlay(file, offset, into)
        found = self._digests.get(id(file))
        if found is not None:
            self._tally.view(found, offset, offset + into.numel())

    def end(self, landed: Landed | None = None) -> int:
        """Verify what did not pass through whole.

        Raises:
            IntegrityError: a unit's digest is another one.
            LoadkitError: as the inner reader.
        """
        tasks: list[Task] = []
        total = 0
        for found in self._digests.values():
            left = self._tally.left(found)
            mapped = self._tally.is_mapped(found)
            unseen = self._tally.unseen(found, left) if mapped else 0
            if unseen and landed is not None:
                landed(unseen)
            total += unseen
            run = self._mapped if mapped else partial(self._unit, inside=(), landed=landed)
            tasks += [partial(run, found, unit) for unit in left]
        total += self._run(tasks) + self.inner.end(landed)
        for found in self._digests.values():
            warning = self._keep(found)
            if warning:
                self.remarks.append(warning)
        return total

    def verified(self) -> dict[str, Any]:
        """What the report says of it."""
        touched = [found for found in self._digests.values() if self._tally.is_touched(found)]
        return {
            "compared_bytes": self.compared,
            "recorded_bytes": self.recorded,
            "files": {found.file.name: found.origin for found in touched},
        }

    def close(self) -> None:
        self._buffers.clear()
        self.inner.close()

    # -- the parts -------------------------------------------------------------------------------

    def _staged(
        self, found: FileDigests, items: Sequence[Extent] | Sequence[Place], tally: Tally
    ) -> list[int]:
        """The units that a call reads whole: it wants half of them or more."""
        wanted: dict[int, int] = {}
        for start, end in merged(span for item in items for span in spans(item, BLOCK)):
            for unit in found.touching(start, end):
                low, high = found.unit(unit)
                wanted[unit] = wanted.get(unit, 0) + min(end, high) - max(start, low)
        tally.touch(found, wanted)
        if self.streaming:  # what is read is handed out at once
            return sorted(unit for unit in wanted if not tally.is_verified(found, unit))
        sizes = {unit: high - low for unit in wanted for low, high in [found.unit(unit)]}
        return sorted(unit for unit, nbytes in wanted.items() if 2 * nbytes >= sizes[unit])

    def _run(self, tasks: Sequence[Task]) -> int:
        return run_tasks(iter(tasks), min(self._threads, len(tasks))) if tasks else 0

    def _unit(
        self, found: FileDigests, unit: int, inside: Sequence[Extent], landed: Landed | None
    ) -> int:
        """Read a unit, verify it and hand on what is wanted of it; the bytes read."""
        if not self.streaming:
            return self._staged_unit(found, unit, inside, landed)
        with self._tally.claimed(found, unit):  # another thread may be at it
            if not self._tally.is_verified(found, unit):
                return self._staged_unit(found, unit, inside, landed)
        window = found.unit(unit)
        parts = [part_of(item, piece) for item in inside for piece in cut(item, *window)]
        return self.inner.read(_sorted(parts), landed)

    def _staged_unit(
        self, found: FileDigests, unit: int, inside: Sequence[Extent], landed: Landed | None
    ) -> int:
        start, end = found.unit(unit)
        buffer = self._buffer()
        moved = 0
        try:
            check = Check(found, unit)
            for low, high in chunks(start, end):
                length = high - low
                dest = buffer[:length]
                tensor = owner_at(inside, low).tensor if inside else ""
                place = Extent(found.file, low, length, 1, length, dest, length, tensor)
                moved += self.inner.read([place], landed)
                check.add(low, buffer_at(buffer.data_ptr(), length))
                if high == end:
                    self._verified(found, unit, check)
                scatter(buffer.data_ptr(), low, high, inside)
        finally:
            with self._lock:
                self._buffers.append(buffer)
        return moved

    def _mapped(self, found: FileDigests, unit: int) -> int:
        """Verify a unit where it is mapped; nothing is read that was not counted."""
        check = Check(found, unit)
        for low, high in chunks(*found.unit(unit)):
            shown = self.inner.view(found.file, low, high - low)
            check.add(low, buffer_at(shown.data_ptr(), high - low))
        self._verified(found, unit, check)
        return 0

    def _verified(self, found: FileDigests, unit: int, check: Check) -> None:
        """Hold a unit's digest against what it should be, or record it."""
        start, end = found.unit(unit)
        digest = check.whole.hexdigest()
        expected = found.digests[unit]
        if expected is not None and digest != expected:
            raise mismatch(found, unit, digest, self._names)
        with self._lock:
            found.found |= check.blocks
            if expected is None:
                self.recorded += end - start
            else:
                self.compared += end - start
        self._tally.verify(found, unit)

    def _buffer(self) -> torch.Tensor:
        with self._lock:
            if self._buffers:
                return self._buffers.pop()
        return torch.empty(BLOCK, dtype=torch.uint8, device="cpu")


def _sorted(items: list[Any]) -> list[Any]:
    return sorted(items, key=lambda item: (item.file.name, item.offset))


def _sum(a: Survey, b: Survey) -> Survey:
    return Survey(a.nbytes + b.nbytes, a.requests + b.requests)
