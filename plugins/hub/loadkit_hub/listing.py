"""A commit's files as the hub lists them: names, sizes, and what they hold."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urljoin

from loadkit.errors import DownloadError, LoadkitError
from loadkit.json_safe import parse_json
from loadkit.network.addresses import origin_of
from loadkit.sources.paths import check_name
from loadkit.sources.shown import shown_source
from loadkit.text import printable

if TYPE_CHECKING:
    from loadkit.network.http_client import HttpClient, Reply
    from loadkit.network.patience import Retries

__all__ = [
    "COMMIT",
    "MAX_FILES",
    "MAX_SIZE",
    "SHA256",
    "Entry",
    "commit_of",
    "fetch_listing",
    "read_listing",
    "written_listing",
]

COMMIT = re.compile(r"[0-9a-f]{40}")
_OID = re.compile(r"[0-9a-f]{40}")
SHA256 = re.compile(r"[0-9a-f]{64}")
_NEXT = re.compile(r'<([^<>]{1,4096})>\s*;\s*rel="next"')
MAX_FILES = 100_000
MAX_PAGE = 32 << 20  # bytes
MAX_SIZE = 1 << 50  # bytes of one file
_VERSION = 1  # of the listing's file in the cache, which huggingface_hub reads and writes too

Refused = Callable[["Reply"], LoadkitError]


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of a commit.

    Attributes:
        name: with "/" between folders.
        size: in bytes.
        oid: git's SHA-1 of a small file; the SHA-256 of one in large file storage.
        blob: git's SHA-1 of what git itself holds: the file, or the pointer to it.
    """

    name: str
    size: int
    oid: str
    blob: str

    @property
    def sha256(self) -> str | None:
        """The content's, where the hub tells it."""
        return self.oid if len(self.oid) == 64 else None


def commit_of(
    client: HttpClient, endpoint: str, repo: str, revision: str, retries: Retries, refused: Refused
) -> str:
    """The commit that a branch or tag is at.

    Raises:
        DownloadError: the hub answers wrong, late or not at all.
        LoadkitError: what ``refused`` makes of its answer.
    """
    url = f"{endpoint}/api/models/{repo}/revision/{quote(revision, safe='')}"
    found, _ = _json(client, url, retries, refused)
    commit = found.get("sha") if isinstance(found, dict) else None
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
        raise _wrong(url, f"names the commit {printable(repr(commit), 80)}")
    return commit


def fetch_listing(
    client: HttpClient, endpoint: str, repo: str, commit: str, retries: Retries, refused: Refused
) -> list[Entry]:
    """Every file of a commit.

    Raises:
        DownloadError: the hub answers wrong, late or not at all.
        PathError: a name in it leads out of the repository.
        LoadkitError: what ``refused`` makes of its answer.
    """
    url = f"{endpoint}/api/models/{repo}/tree/{commit}?recursive=true&expand=false"
    entries: list[Entry] = []
    while True:
        page, headers = _json(client, url, retries, refused)
        if not isinstance(page, list):
            raise _wrong(url, "is no list of files")
        entries += [_entry(url, item) for item in page if _is_file(item)]
        if len(entries) > MAX_FILES:
            raise _wrong(url, f"lists more than {MAX_FILES} files")
        match = _NEXT.search(headers.get("Link", ""))
        if match is None:
            return sorted(entries, key=lambda entry: entry.name)
        if not page:
            raise _wrong(url, "has pages without a file")
        following = urljoin(url, match[1])
        if origin_of(following) != origin_of(url):
            raise _wrong(url, "goes on at another host")
        url = following


def _json(
    client: HttpClient, url: str, retries: Retries, refused: Refused
) -> tuple[Any, Mapping[str, str]]:
    data, headers = client.content(url, MAX_PAGE, retries, refused)
    try:
        return parse_json(data, file="the answer", max_bytes=MAX_PAGE), headers
    except LoadkitError as error:
        raise _wrong(url, f"is no JSON: {error.message}") from None


def _is_file(item: object) -> bool:
    return isinstance(item, dict) and item.get("type", "file") == "file"


def _entry(where: str, item: Mapping[str, Any]) -> Entry:
    """One item of a listing, checked: its name becomes a path, its digest a file's name."""
    name = check_name(item.get("path"))
    lfs = item.get("lfs")
    blob, size = item.get("oid"), item.get("size")
    digest = blob
    if lfs is not None:
        digest = lfs.get("oid") if isinstance(lfs, dict) else None
        size = lfs.get("size", size) if isinstance(lfs, dict) else None
    return _checked(where, name, size, digest, blob, large=lfs is not None)


def _checked(
    where: str, name: str, size: object, digest: object, blob: object, *, large: bool
) -> Entry:
    rule = SHA256 if large else _OID
    good = isinstance(size, int) and not isinstance(size, bool) and 0 <= size <= MAX_SIZE
    if not good or not isinstance(digest, str) or not rule.fullmatch(digest):
        raise _wrong(where, f"says of {printable(name)} a size or a digest that cannot be")
    if not isinstance(blob, str) or not _OID.fullmatch(blob):
        raise _wrong(where, f"says of {printable(name)} an object that cannot be")
    return Entry(name, int(str(size)), digest, blob)


def _wrong(url: str, what: str) -> DownloadError:
    return DownloadError(
        f"the answer of {printable(shown_source(url), 300)} {what}",
        hint="the hub, or a proxy before it, is at fault",
    )


# -- in the cache --------------------------------------------------------------------------------


def written_listing(entries: list[Entry]) -> bytes:
    """A listing as the cache keeps it: ``trees/<commit>.json``."""
    files: dict[str, dict[str, Any]] = {}
    for entry in entries:
        files[entry.name] = {"size": entry.size, "blob_id": entry.blob}
        if entry.sha256:
            files[entry.name] |= {"lfs_sha256": entry.sha256, "lfs_size": entry.size}
    return json.dumps({"format_version": _VERSION, "files": files}, indent=1).encode()


def read_listing(data: bytes, where: str) -> list[Entry] | None:
    """What ``written_listing`` or ``huggingface_hub`` wrote; None of another version.

    Raises:
        LoadkitError: it is damaged.
    """
    found = parse_json(data, file=where, max_bytes=MAX_PAGE)
    if not isinstance(found, dict) or found.get("format_version") != _VERSION:
        return None
    return sorted(_kept(where, found.get("files")), key=lambda entry: entry.name)


def _kept(where: str, files: object) -> Iterator[Entry]:
    if not isinstance(files, dict):
        raise _wrong(where, "holds no files")
    for name, item in files.items():
        if not isinstance(item, dict):
            raise _wrong(where, f"says nothing of {printable(name)}")
        large = item.get("lfs_sha256") is not None
        digest = item["lfs_sha256"] if large else item.get("blob_id")
        size = item.get("lfs_size", item.get("size")) if large else item.get("size")
        yield _checked(where, check_name(name), size, digest, item.get("blob_id"), large=large)
