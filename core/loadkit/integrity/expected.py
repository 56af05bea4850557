"""Who says what the files of a checkpoint should hold.

In this order, for each file:

1. the manifest of the folder: digests of its tensors, else that of the whole file;
2. the hub it came from: the SHA-256 of the whole file;
3. the file's own format, where it keeps checksums (a zip archive does);
4. a record of an earlier load: digests of blocks.

A record never outweighs the others. It helps where the first two have a digest of a whole file
and a rank needs a part: blocks that an earlier load recorded while it found that very digest to
be right are as good as the digest, and need not be read whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from loadkit.errors import FormatError, IntegrityError
from loadkit.file_checks import show
from loadkit.integrity.digests import FileDigests, blocks_of
from loadkit.integrity.sidecar import Record, Sidecar
from loadkit.manifest import MANIFEST, read_manifest

if TYPE_CHECKING:
    from loadkit.base_loader import Checksum
    from loadkit.config import LoadConfig
    from loadkit.manifest import FileEntry
    from loadkit.sources.base import File, Source

__all__ = ["check_sizes", "expected_digests", "sidecars"]

_AGAIN = "the file is damaged: download or copy it again"


def check_sizes(source: Source, files: Sequence[File]) -> None:
    """Hold the files' sizes against the manifest, if the source has one.

    Raises:
        IntegrityError: E_SIZE, lists every file whose size is another one.
        ManifestError: the manifest cannot be used.
    """
    manifest = read_manifest(source)
    entries = {} if manifest is None else manifest.files
    wrong = [
        (file, entries[file.name].size)
        for file in files
        if file.name in entries and file.size != entries[file.name].size
    ]
    if not wrong:
        return
    told = "; ".join(f"{show(f.name)} has {f.size} bytes, not {size}" for f, size in wrong[:10])
    raise IntegrityError(
        f"{len(wrong)} file(s) are not as long as {MANIFEST} says: {told}",
        code="E_SIZE",
        file=wrong[0][0].name,
        detail={"files": {f.name: {"found": f.size, "expected": size} for f, size in wrong}},
        hint=_AGAIN,
    )


def sidecars(files: Sequence[File], load_config: LoadConfig) -> dict[int, Sidecar]:
    """The place of each file's record, by ``id(file)``, where there is one."""
    found = ((file, Sidecar.of(file, load_config.digest_store)) for file in files)
    return {id(file): sidecar for file, sidecar in found if sidecar is not None}


def expected_digests(
    source: Source,
    files: Sequence[File],
    places: dict[int, Sidecar],
    checksums: Callable[[str], Sequence[Checksum]] | None = None,
    vouched: Collection[int] = (),
) -> tuple[dict[int, FileDigests], list[str]]:
    """What each file should hold, by ``id(file)``, and what is worth a warning.

    Args:
        source: the open source of the files.
        files: those that are read.
        places: of their records.
        checksums: what a file keeps of its own bytes, by its name.
        vouched: files (``id``) that are compared with what they say themselves, else.

    Raises:
        ManifestError: the manifest cannot be used.
    """
    manifest = read_manifest(source)
    hub = {info.name: info.sha256 for info in source.list() if info.sha256}
    out: dict[int, FileDigests] = {}
    warnings: list[str] = []
    for file in files:
        entry = None if manifest is None else manifest.files.get(file.name)
        by_tensor = None if entry is None else _of_tensors(file, entry)
        if by_tensor is not None:
            out[id(file)] = by_tensor
            continue
        place = places.get(id(file))
        record = Record() if place is None else _record(place, warnings)
        whole, origin = hub.get(file.name), "the hub"
        if entry is not None and entry.sha256:
            whole, origin = entry.sha256, MANIFEST
        own = checksums(file.name) if whole is None and checksums is not None else ()
        if own:
            starts, ends, crcs = (list(each) for each in zip(*own, strict=True))
            origin = "the archive itself"
            out[id(file)] = FileDigests(file, origin, _AGAIN, starts, ends, crcs, algorithm="crc32")
            continue
        if whole is None and not file.local:  # nothing to compare with, and nowhere to record
            if id(file) not in vouched:
                told = f"{show(file.name)} is not verified: nobody says what it should hold"
                warnings.append(told)
            continue
        out[id(file)] = _of_file(file, whole, origin, place, record)
    return out, warnings


def _of_tensors(file: File, entry: FileEntry) -> FileDigests | None:
    """A unit for each tensor, if the manifest has a digest of all of them."""
    tensors = sorted((t for t in entry.tensors.values() if t.nbytes), key=lambda t: t.offset)
    if not tensors or any(tensor.sha256 is None for tensor in tensors):
        return None
    starts = [tensor.offset for tensor in tensors]
    ends = [tensor.offset + tensor.nbytes for tensor in tensors]
    if any(end > start for end, start in zip(ends, starts[1:], strict=False)):
        return None  # they overlap
    return FileDigests(file, MANIFEST, _AGAIN, starts, ends, [t.sha256 for t in tensors])


def _of_file(
    file: File, whole: str | None, origin: str, place: Sidecar | None, record: Record
) -> FileDigests:
    """The file as one unit, or its blocks where a record of them counts or has to be made."""
    starts, ends = blocks_of(file.size)
    complete = len(record.blocks) == len(starts)
    if whole is not None and not (complete and record.whole == whole):
        records = place is not None and bool(starts)
        return FileDigests(
            file, origin, _AGAIN, [0], [file.size], [whole], whole=whole, records=records
        )
    advice = f"if the file was meant to change, remove the record {place and place.path}"
    if whole is not None:
        origin = f"the record of a load that found what {origin} says"
    else:
        origin = "the record of an earlier load"
    blocks: list[str | None] = [record.blocks.get(number) for number in range(len(starts))]
    return FileDigests(
        file, origin, advice, starts, ends, blocks, whole=whole, records=place is not None
    )


def _record(place: Sidecar, warnings: list[str]) -> Record:
    """An earlier load's record; a damaged one counts as none, and is replaced."""
    try:
        return place.read()
    except (FormatError, OSError) as error:
        warnings.append(f"the record of digests {place.path} cannot be used: {error}")
        return Record()
