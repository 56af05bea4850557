"""What the hub's refusals mean, and what to do about each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadkit.errors import DownloadError, LoadkitError, PathError
from loadkit.file_checks import show
from loadkit.text import printable

if TYPE_CHECKING:
    from loadkit.network.http_client import Reply

__all__ = ["refusal"]

_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


def refusal(
    reply: Reply, file: str, *, repo: str, revision: str, endpoint: str, token: str | None
) -> LoadkitError:
    """The error for an answer that is no success. Its text never holds the token.

    Args:
        reply: the answer; only its status and headers are looked at.
        file: which file was asked for, "" for the repository itself.
        repo: the repository.
        revision: the revision that was asked for.
        endpoint: the hub's address.
        token: what was sent; only whether there was one is told.
    """
    status = reply.status
    kind = reply.headers.get("x-error-code", "")
    said = reply.headers.get("x-error-message", "")
    if token:
        said = said.replace(token, "***")
    told = f" It says: {printable(said, 200)}" if said else ""
    where = f"{show(file)} of {show(repo)}" if file else f"repository {show(repo)}"
    detail = {"status": status, "repo": repo, "revision": revision, "error": printable(kind, 60)}
    if kind == "GatedRepo" or (status == 403 and "gated" in said.lower()):
        return DownloadError(
            f"{where} is gated: only who has accepted its terms may read it.{told}",
            code="E_AUTH",
            detail=detail,
            hint=f"accept them at {endpoint}/{repo}, and "
            + ("use a token of that account" if token else _LOG_IN),
        )
    if kind == "RevisionNotFound":
        return PathError(
            f"{show(repo)} has no revision {show(revision)}",
            detail=detail,
            hint="name a branch, a tag or a full commit of it",
        )
    if kind == "EntryNotFound" or (status == 404 and file):
        return PathError(
            f"{show(repo)} has no file {show(file)} at {show(revision)}", file=file, detail=detail
        )
    if status == 401:
        return DownloadError(
            f"the hub refuses the token it was sent for {where}.{told}"
            if token
            else f"{where} cannot be read without a token: it is private, or does not exist.{told}",
            code="E_AUTH",
            detail=detail,
            hint="log in again with `hf auth login`" if token else f"check its name, or {_LOG_IN}",
        )
    if status == 403:
        return DownloadError(
            f"the hub does not let {'this token' if token else 'anybody'} read {where}.{told}",
            code="E_AUTH",
            detail=detail,
            hint="give the token the right to read this repository" if token else _LOG_IN,
        )
    if status == 404 or kind == "RepoNotFound":
        return PathError(
            f"the hub has no {where}",
            detail=detail,
            hint="check its name" + ("" if token else f"; if it is private, {_LOG_IN}"),
        )
    return DownloadError(
        f"the hub answered {status} for {where}.{told}",
        detail=detail,
        hint="try again later; if it stays so, the hub or a proxy before it is at fault",
    )
