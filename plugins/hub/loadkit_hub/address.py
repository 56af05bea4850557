"""What a repository's address says: which one, at which revision, and which part of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote

from loadkit.errors import OptionError
from loadkit.file_checks import show_path
from loadkit.sources.paths import check_name

__all__ = ["Address", "check_revision", "parse_address"]

_PART = r"[A-Za-z0-9_](?:[\w.-]{0,95})"
_REVISION = r"refs/pr/\d{1,9}|[^/@:]+"
_ADDRESS = re.compile(
    rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>{_REVISION}))?"
    r"(?::(?P<quant>[A-Za-z0-9_.-]{1,64}))?(?:/(?P<path>.*))?",
    re.ASCII,
)
_REVISION_NAME = re.compile(r"[\w][\w./+-]{0,249}", re.ASCII)
_OTHER_KINDS = ("datasets/", "spaces/", "kernels/", "buckets/")


@dataclass(frozen=True)
class Address:
    """A repository and what of it is meant.

    Attributes:
        repo: ``org/name``.
        revision: branch, tag or commit; None where none is named.
        path: a folder or a file of it, "" for all.
        quant: which of several GGUF models, as in ``org/name:Q4_K_M``; "" for none.
    """

    repo: str
    revision: str | None
    path: str
    quant: str


def parse_address(uri: str, scheme: str, revision: str | None, subfolder: str | None) -> Address:
    """Read ``[scheme://]org/name[@revision][:quant][/path]``.

    Args:
        uri: what the user gave.
        scheme: the scheme it may begin with.
        revision: ``LoadConfig.revision``.
        subfolder: ``LoadConfig.subfolder``.

    Raises:
        OptionError: it is no such address, or names another revision than ``revision``.
        PathError: its path leads out of the repository.
    """
    text = uri[len(scheme) + 3 :] if uri.lower().startswith(f"{scheme}://") else uri
    text = text.removeprefix("models/").rstrip("/")
    match = None if text.startswith(_OTHER_KINDS) else _ADDRESS.fullmatch(text)
    if match is None or any(_bad(part) for part in match["repo"].split("/")):
        raise OptionError(
            f"{show_path(uri)} is no model repository; accepted: "
            f"{scheme}://org/name[@revision][:quantisation][/folder]",
            detail={"source": uri},
        )
    named = unquote(match["revision"]) if match["revision"] else None
    if named and revision and named != revision:
        raise OptionError(
            f"{show_path(uri)} names revision {show_path(named)} and LoadConfig.revision "
            f"{show_path(revision)}",
            hint="leave out one of the two",
        )
    parts = [part for part in (match["path"], subfolder) if part]
    path = check_name("/".join(parts)) if parts else ""
    return Address(match["repo"], check_revision(named or revision), path, match["quant"] or "")


def check_revision(revision: str | None) -> str | None:
    """A revision's name, if it can be one: it becomes part of addresses and of a file's name.

    Raises:
        OptionError: it cannot.
    """
    if revision is None:
        return None
    if not _REVISION_NAME.fullmatch(revision) or any(_bad(p) for p in revision.split("/")):
        raise OptionError(
            f"revision {show_path(revision)} is no name of a branch, a tag or a commit",
            detail={"revision": revision},
        )
    return revision


def _bad(part: str) -> bool:
    """Parts that mean something else in a path, or that the hub refuses in a name."""
    return part in ("", ".", "..") or ".." in part or part.endswith((".git", ".lock", "."))
