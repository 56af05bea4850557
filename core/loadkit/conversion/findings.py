"""What a look at a checkpoint's files found, check by check."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from loadkit.conversion.outputs import Output, read_slabs, slabs_of
from loadkit.detect import kind_of
from loadkit.errors import CheckpointError
from loadkit.file_checks import show
from loadkit.file_headers import header_of
from loadkit.integrity.expected import expected_digests
from loadkit.load_plan import SHOWN, Problem
from loadkit.manifest import MANIFEST, FileEntry, Manifest

if TYPE_CHECKING:
    from loadkit.base_loader import BaseModelLoader
    from loadkit.conversion.contents import Contents
    from loadkit.diff import DiffReport
    from loadkit.integrity.digests import FileDigests, Hash
    from loadkit.sources.base import File, Source

__all__ = ["Check", "Findings"]

SLAB = 16 << 20  # bytes of tensors that are looked at at once
BLOCK = 4 << 20  # bytes that are hashed at once

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at. ``ok`` None: it could not be, ``detail`` says why."""

    name: str
    ok: bool | None
    detail: str


class Findings:
    """Goes through a checkpoint once. ``checks``, ``problems`` and ``files`` result."""

    def __init__(self) -> None:
        self.checks: list[Check] = []
        self.problems: list[Problem] = []
        self.files: dict[str, dict[str, Any]] = {}

    def tried(self, name: str, look: Callable[[], Value]) -> Value | None:
        """What a look gives; None where the checkpoint is at fault, which is a problem then."""
        try:
            found = look()
        except CheckpointError as error:
            self._fault(error)
            self._check(name, False, error.message)
            return None
        if name == "headers":
            self._check(name, True, "every header is whole, and the index fits the files")
        return found

    def list_files(self, source: Source, manifest: Manifest) -> None:
        """Every file of the manifest is there, as long as it has to be."""
        sizes = {info.name: info.size for info in source.list()}
        before = len(self.problems)
        for name, entry in manifest.files.items():
            if name not in sizes:
                self._problem("MISSING_FILE", f"{show(name)} is named by {MANIFEST}", name)
                continue
            self._file(name, sizes[name])
            if sizes[name] != entry.size:
                text = f"{show(name)} has {sizes[name]} bytes; {MANIFEST} says {entry.size}"
                self._problem("SIZE", text, name, hint="copy it again")
        bad = len(self.problems) - before
        text = f"{len(manifest.files)} file(s) of {MANIFEST}: {bad} missing or of another size"
        self._check("files", not bad, text)

    def list_tensors(self, manifest: Manifest, files: Sequence[File]) -> None:
        """Every header is what the manifest says of its file."""
        before = len(self.problems)
        listed = {name: entry for name, entry in manifest.files.items() if entry.tensors}
        for file in files:
            if file.name not in listed:
                if manifest.files:
                    text = f"{show(file.name)} is no file of {MANIFEST}"
                    self._problem("UNLISTED_FILE", text, file.name)
                continue
            expected = {
                name: (one.dtype, one.shape, one.offset)
                for name, one in listed[file.name].tensors.items()
            }
            plain = file.name.endswith(".safetensors")  # a variant's, too
            kind = "safetensors" if plain else kind_of(file.name.rpartition("/")[2])
            header = header_of(file, kind)
            tensors = () if header is None else header.tensors
            found = {one.name: (one.dtype, one.shape, one.offset) for one in tensors}
            for name in sorted(found.keys() | expected.keys()):
                if found.get(name) != expected.get(name):
                    self._tensor(file, name, expected.get(name), found.get(name))
        bad = len(self.problems) - before
        self._check("tensors", not bad, f"{bad} tensor(s) are not as {MANIFEST} says")

    def _tensor(self, file: File, name: str, expected: Any, found: Any) -> None:
        told = [
            "missing" if place is None else f"{place[0]} {list(place[1])} at byte {place[2]}"
            for place in (found, expected)
        ]
        text = f"{show(name)} is {told[0]} in {show(file.name)}; {MANIFEST} says {told[1]}"
        self._problem("TENSOR", text, file.name, name)

    def digests(
        self,
        source: Source,
        names: Collection[str],
        manifest: Manifest | None,
        loader: BaseModelLoader | None = None,
    ) -> None:
        """Every file holds the bytes that are vouched for: by the manifest, the hub, or itself.

        Args:
            source: the open source of the files.
            names: of those that are looked at.
            manifest: of the folder.
            loader: knows what files of its format keep of their own bytes.
        """
        files = [source.open(name) for name in sorted(names)]
        entries = {} if manifest is None else manifest.files
        before, vouched = len(self.problems), 0
        others = []
        for file in files:
            self._file(file.name, file.size)
            entry = entries.get(file.name)
            if entry is None or entry.sha256 is None:
                others.append(file)
                continue
            vouched += 1
            found = _sha256(file, 0, file.size)
            self.files[file.name] |= {"sha256": found, "vouched": MANIFEST}
            if found != entry.sha256:
                self._damaged(file, entry, found)
        checksums = None if loader is None else loader.checksums
        expected, _ = expected_digests(source, others, {}, checksums) if others else ({}, [])
        for file in others:
            units = expected.get(id(file))
            if loader is not None and (units is None or not any(units.digests)):
                units = self._own_digests(loader, file)
            if units is not None and any(units.digests):
                vouched += 1
                self._units(file, units)
        bad = len(self.problems) - before
        if not vouched:
            self._check("digests", None, "nobody vouches for the bytes of these files")
            return
        text = f"{vouched} of {len(files)} file(s) were compared: {bad} problem(s)"
        self._check("digests", not bad, text)

    def _own_digests(self, loader: BaseModelLoader, file: File) -> FileDigests | None:
        """What a file's own headers say of its bytes."""
        try:
            return next(iter(loader.own_digests([file])), None)
        except CheckpointError as error:
            self._fault(error)
            return None

    def _damaged(self, file: File, entry: FileEntry, found: str) -> None:
        """A file holds other bytes: say in which tensors, where that is known."""
        tensors = [
            name
            for name, one in entry.tensors.items()
            if one.sha256 is not None
            and one.offset + one.nbytes <= file.size
            and _sha256(file, one.offset, one.offset + one.nbytes) != one.sha256
        ]
        text = f"{show(file.name)} has the sha256 {found}; {MANIFEST} says {entry.sha256}"
        if tensors:
            some = ", ".join(map(show, tensors[:SHOWN]))
            text += f"; other bytes are in {some}" + (" ..." if len(tensors) > SHOWN else "")
        tensor = tensors[0] if tensors else None
        self._problem("DIGEST", text, file.name, tensor, "copy or download it again")

    def _units(self, file: File, digests: FileDigests) -> None:
        self.files[file.name]["vouched"] = digests.origin
        for number, wanted in enumerate(digests.digests):
            start, end = digests.unit(number)
            if end > file.size or wanted is None:
                continue  # shorter than it should be is a problem already
            made = digests.hash_of(number)
            found = _digest(file, start, end, made)
            if (start, end) == (0, file.size) and made.name == "sha256":
                self.files[file.name]["sha256"] = found
            if found != wanted:
                text = (
                    f"bytes {start} to {end} of {show(file.name)} are not what {digests.origin} "
                    f"says: {made.name} {found}, not {wanted}"
                )
                self._problem("DIGEST", text, file.name, hint=digests.advice)

    def finite(self, every: Sequence[Contents]) -> None:
        """No float is NaN or infinite."""
        before, looked = len(self.problems), 0
        for contents, output in ((each, out) for each in every for out in each.outputs()):
            if not output.dtype.is_floating_point or "x2" in str(output.dtype):
                continue
            looked += 1
            nans, infs = _not_finite(output, contents)
            if nans or infs:
                text = f"{show(output.name)} holds {nans} NaN and {infs} infinite number(s)"
                self._problem("NOT_FINITE", text, tensor=output.name)
        bad = len(self.problems) - before
        self._check("finite", not bad, f"{bad} of {looked} tensor(s) hold NaN or infinity")

    def compared(self, report: DiffReport) -> None:
        """The tensors are another checkpoint's."""
        for side, names in (("a", report.only_in_a), ("b", report.only_in_b)):
            where = report.a.source if side == "a" else report.b.source
            for name in names:
                self._problem("ONLY_IN_ONE", f"{show(name)} is in {show(where)} only", tensor=name)
        for one in report.different:
            text = f"{show(one.tensor)}: {one.what} differ from {show(report.b.source)}"
            self._problem("DIFFERENT", text, tensor=one.tensor)
        count = len(report.only_in_a) + len(report.only_in_b) + len(report.different)
        text = f"{report.compared} tensor(s) compared with {show(report.b.source)}: {count} differ"
        self._check("against", report.equal, text)

    def _file(self, name: str, size: int) -> None:
        self.files.setdefault(name, {"size": size, "sha256": None, "vouched": None})

    def _check(self, name: str, ok: bool | None, detail: str) -> None:
        self.checks.append(Check(name, ok, detail))

    def _fault(self, error: CheckpointError) -> None:
        code = error.code.removeprefix("E_")
        self._problem(code, error.message, error.file, error.tensor, error.hint)

    def _problem(
        self,
        code: str,
        message: str,
        file: str | None = None,
        tensor: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.problems.append(Problem(code, message, tensor, None, file, None, hint))


def _sha256(file: File, start: int, end: int) -> str:
    """The SHA-256 of a range of a file."""
    return _digest(file, start, end, hashlib.sha256())


def _digest(file: File, start: int, end: int, made: Hash) -> str:
    """A hash of a range of a file, read a block at a time."""
    for at in range(start, end, BLOCK):
        made.update(file.read(at, min(BLOCK, end - at)))
    return made.hexdigest()


def _not_finite(output: Output, contents: Contents) -> tuple[int, int]:
    """How many elements are NaN, and how many infinite."""
    nans = infs = 0
    for slab in slabs_of(output, SLAB):
        (flat,), _, _ = read_slabs([slab], contents.reader)
        numbers = flat.view(output.dtype)
        if numbers.itemsize == 1:  # 8-bit floats cannot be compared
            numbers = numbers.to(torch.float32)
        nans += int(numbers.isnan().sum())
        infs += int(numbers.isinf().sum())
    return nans, infs
