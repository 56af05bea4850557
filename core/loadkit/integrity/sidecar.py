"""Digests of a file's blocks, kept by the load that first saw them for the loads that follow.

A record belongs to one content: path, device, inode, size and time of modification. Where one of
these differs the record says nothing, and a new one takes its place. It finds bytes that changed
without anybody writing the file (a failing disk, a bad copy into the page cache); it cannot know
whether they were right at the first load.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadkit.errors import FormatError
from loadkit.integrity.digests import BLOCK, blocks_of
from loadkit.json_safe import parse_json
from loadkit.output_file import write_error

if TYPE_CHECKING:
    from loadkit.sources.base import File

__all__ = ["SIDECAR_SUFFIX", "Record", "Sidecar"]

SCHEMA = "loadkit.digests/1"
SIDECAR_SUFFIX = ".loadkit-digests.json"
MAX_BYTES = 256 << 20  # of a record: 16 TiB of weights
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Record:
    """What is known of a file.

    Attributes:
        blocks: number -> SHA-256 in hex; a rank that read a part has recorded a part.
        whole: the file's SHA-256 that the blocks were checked against, or None.
    """

    blocks: dict[int, str] = field(default_factory=dict)
    whole: str | None = None


@dataclass(frozen=True)
class Sidecar:
    """The place of one file's record.

    Attributes:
        path: where it is, or will be.
        identity: the file's, which a record has to carry to count.
        size: the file's, in bytes.
    """

    path: Path
    identity: tuple[str, ...]
    size: int

    @classmethod
    def of(cls, file: File, store: str) -> Sidecar | None:
        """The place for a file's record, or None where nothing is kept.

        Args:
            file: an open file.
            store: ``LoadConfig.digest_store``; "checkpoint" is beside the file if its folder can
                be written, else in the cache; "none" keeps nothing.
        """
        identity = file.identity()
        if store == "none" or identity is None or file.path is None:
            return None
        beside = Path(file.path + SIDECAR_SUFFIX)
        if store == "checkpoint" and (beside.exists() or os.access(beside.parent, os.W_OK)):
            # A checkpoint that is moved or copied takes its records along: only the size counts.
            return cls(beside, (str(file.size),), file.size)
        folder = _cache()
        if folder is None:
            return None
        key = hashlib.sha256(os.fsencode(file.path)).hexdigest()[:40]
        return cls(folder / f"{key}.json", identity, file.size)

    def read(self) -> Record:
        """The record; empty where there is none, or one of another content.

        Raises:
            FormatError: it is damaged.
            OSError: it cannot be read.
        """
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return Record()
        found = parse_json(data, file=str(self.path), max_bytes=MAX_BYTES)
        problem = _problem(found, self.size)
        if problem:
            raise FormatError(f"{self.path}: {problem}", file=str(self.path))
        if found["identity"] != list(self.identity) or found["block_bytes"] != BLOCK:
            return Record()
        return Record({int(n): value for n, value in found["blocks"].items()}, found["sha256"])

    def write(self, record: Record) -> None:
        """Keep a record, joined with what other ranks kept; the old one or the new, never a mix.

        Raises:
            WriteError: it cannot be written.
        """
        try:
            known = self.read()
        except (FormatError, OSError):
            known = Record()  # damaged: this one takes its place
        same = known.whole == record.whole
        blocks = {**known.blocks, **record.blocks} if same else dict(record.blocks)
        content = {
            "schema": SCHEMA,
            "identity": list(self.identity),
            "block_bytes": BLOCK,
            "sha256": record.whole,
            "blocks": {str(number): blocks[number] for number in sorted(blocks)},
        }
        temporary = ""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.path.parent, suffix=".tmp")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(content, file)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(self.path)
        except OSError as error:
            with suppress(OSError):
                Path(temporary).unlink()
            raise write_error(error, str(self.path), "keep digests in") from error


def _problem(found: Any, size: int) -> str:
    """What is wrong with a record's JSON; empty if nothing is."""
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        return f"this is no {SCHEMA}"
    blocks, whole = found.get("blocks"), found.get("sha256")
    if not isinstance(blocks, dict) or not isinstance(found.get("identity"), list):
        return "blocks or identity are missing"
    count = len(blocks_of(size)[0]) if found.get("block_bytes") == BLOCK else 1 << 40
    for number, digest in blocks.items():
        good = number.isascii() and number.isdigit() and len(number) < 16 and int(number) < count
        if not good or not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            return f"block {number!r:.20} is no block with a SHA-256"
    if whole is not None and not (isinstance(whole, str) and _DIGEST.fullmatch(whole)):
        return "sha256 is none"
    return ""


def _cache() -> Path | None:
    """Where records are kept, or None where there is no such place."""
    given = os.environ.get("LOADKIT_CACHE") or os.environ.get("XDG_CACHE_HOME")
    try:
        base = Path(given) if given else Path.home() / ".cache"
    except RuntimeError:
        return None
    return base / "loadkit" / "digests"
