"""A repository in the hub's cache, laid out as ``huggingface_hub`` does it.

``blobs/<digest>`` hold the bytes, ``snapshots/<commit>/<name>`` are links to them,
``refs/<revision>`` says which commit a branch was at, ``trees/<commit>.json`` what a commit holds.
Digests are checked before they become names of files; what a server sends as ETag never does.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from loadkit.errors import LoadkitError, WriteError
from loadkit.file_checks import show_path
from loadkit.output_file import write_error
from loadkit_hub.listing import COMMIT, Entry, read_listing, written_listing

__all__ = ["RepoCache"]

logger = logging.getLogger(__name__)

_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_MAX_LISTING = 64 << 20  # bytes


class RepoCache:
    """One repository's folder. Nothing is made before something is written.

    Args:
        root: the cache's folder.
        repo: ``org/name``, checked.
    """

    def __init__(self, root: Path, repo: str) -> None:
        name = f"models--{repo.replace('/', '--')}"
        self.root = root
        self.folder = root / name
        self.locks = root / ".locks" / name

    def snapshot(self, commit: str) -> Path:
        """The folder of a commit's files."""
        return self.folder / "snapshots" / commit

    def blob(self, digest: str) -> Path:
        """Where bytes of a digest lie.

        Raises:
            ValueError: it is no digest.
        """
        if not _DIGEST.fullmatch(digest):
            raise ValueError(f"{digest!r} is no digest")
        return self.folder / "blobs" / digest

    def lock(self, digest: str) -> Path:
        """The lock of a blob."""
        return self.locks / f"{self.blob(digest).name}.lock"

    def commit_of(self, revision: str) -> str | None:
        """The commit that a revision was at when it was last asked for."""
        if COMMIT.fullmatch(revision):
            return revision
        try:
            found = Path(self.folder, "refs", *revision.split("/")).read_text("ascii").strip()
        except (OSError, ValueError):
            return None
        return found if COMMIT.fullmatch(found) else None

    def listing(self, commit: str) -> list[Entry] | None:
        """A commit's files, if they were listed before."""
        path = self._tree(commit)
        try:
            if path.stat().st_size > _MAX_LISTING:
                return None
            return read_listing(path.read_bytes(), show_path(path))
        except OSError:
            return None
        except LoadkitError as error:
            logger.warning("the list of files in the cache counts for nothing: %s", error)
            return None

    def _tree(self, commit: str) -> Path:
        return self.folder / "trees" / f"{commit}.json"

    def has(self, commit: str, entry: Entry) -> bool:
        """Whether a file is there, whole as far as its size tells."""
        try:
            return Path(self.snapshot(commit), entry.name).stat().st_size == entry.size
        except OSError:
            return False

    # -- writing ---------------------------------------------------------------------------------

    def remember(self, revision: str, commit: str, entries: Sequence[Entry]) -> None:
        """Keep what a revision was and what the commit holds. A cache that cannot is no failure."""
        try:
            _replace(self._tree(commit), written_listing(list(entries)))
            if not COMMIT.fullmatch(revision):
                ref = Path(self.folder, "refs", *revision.split("/"))
                if self.commit_of(revision) != commit:
                    _replace(ref, commit.encode())
        except OSError as error:
            logger.warning("the hub's cache cannot be written to: %s", error.strerror or error)

    def link(self, commit: str, entry: Entry) -> None:
        """Make a file of the commit from the blob of its digest, which is there.

        Raises:
            WriteError: the system refuses.
        """
        target = Path(self.snapshot(commit), entry.name)
        blob = self.blob(entry.oid)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            new = target.with_name(f".{secrets.token_hex(8)}.tmp")
            try:
                new.symlink_to(os.path.relpath(blob, target.parent))
            except OSError:  # a file system without links
                os.replace(blob, target)  # noqa: PTH105
                return
            os.replace(new, target)  # noqa: PTH105
        except OSError as error:
            raise cannot_write(error, self.root) from error


def _replace(path: Path, data: bytes) -> None:
    """Write a small file in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        new.write_bytes(data)
        os.replace(new, path)  # noqa: PTH105
    finally:
        new.unlink(missing_ok=True)


def cannot_write(error: OSError, root: Path) -> WriteError:
    """The error of a cache that cannot be written to."""
    found = write_error(error, str(root), "write to the hub's cache")
    found.hint = (
        "make room, or name another folder: cache_dir=..., HF_HUB_CACHE; stream=true keeps nothing"
    )
    return found
