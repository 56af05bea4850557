"""``hf://org/name[@revision][:quantisation][/folder]``, and plain ``org/name``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from loadkit.errors import DownloadError
from loadkit.file_checks import show, show_path
from loadkit.network import make_client
from loadkit.network.addresses import origin_of
from loadkit.network.answers import Pin
from loadkit.network.patience import Deadline, Retries
from loadkit.sources.base import FileInfo
from loadkit.sources.shown import shown_source
from loadkit.text import printable
from loadkit_hub.address import parse_address
from loadkit_hub.blobs import fetch_blob
from loadkit_hub.cache import RepoCache
from loadkit_hub.listing import COMMIT, Entry, commit_of, fetch_listing
from loadkit_hub.refusals import refusal
from loadkit_hub.repository import Repository
from loadkit_hub.settings import read_settings
from loadkit_hub.walk import files_below

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from loadkit.config import LoadConfig
    from loadkit.errors import LoadkitError
    from loadkit.network.http_client import Reply

__all__ = ["HubSource"]

logger = logging.getLogger(__name__)

MAIN = "main"


class HubSource(Repository):
    """A repository of the Hugging Face hub.

    The revision becomes a commit when the source is opened, once; everything after that is of this
    commit. What the cache holds of it is used and needs no network; other files are read by ranges
    until ``make_local`` fetches them.

    Attributes:
        commit: the commit.
        uri: names it.

    Raises:
        OptionError: the address or the revision cannot be.
        NotInstalledError: ``huggingface_hub`` or ``urllib3`` is missing.
        PathError: there is no such repository, revision or folder.
        DownloadError: E_AUTH, it may not be read; E_OFFLINE, it is not in the cache and the hub is
            not asked or not reached; otherwise the hub answers wrong or late.
    """

    def __init__(self, uri: str, load_config: LoadConfig) -> None:
        address = parse_address(uri, "hf", load_config.revision, load_config.subfolder)
        super().__init__(uri, load_config, address)
        self._settings = read_settings(load_config)
        self._revision = address.revision or MAIN
        self._cache = RepoCache(self._settings.cache, address.repo)
        self._entries: dict[str, Entry] = {}
        credentials = {}
        if self._settings.token:
            origin = origin_of(self._settings.endpoint)
            credentials[origin] = {"Authorization": f"Bearer {self._settings.token}"}
        self._client = make_client(load_config.network_timeout, credentials)
        self._ask(self._client)
        try:
            if self._settings.offline:
                self._go_offline("HF_HUB_OFFLINE is set, so the hub is not asked")
            self.commit = self._pin()
            self.uri = f"hf://{address.repo}@{self.commit}" + (
                f":{address.quant}" if address.quant else ""
            )
            if address.path:
                self.uri += f"/{address.path}"
            self._settle(self._find_files())
        except BaseException:
            self.close()
            raise
        logger.info("%s at %s is commit %s", address.repo, self._revision, self.commit)

    # -- which commit, which files -----------------------------------------------------------------

    def _go_offline(self, why: str) -> None:
        self.offline, self.why_offline = True, why

    def _pin(self) -> str:
        """The commit of the revision: the hub's word, or the cache's where it is not reached."""
        if COMMIT.fullmatch(self._revision):
            return self._revision
        if not self.offline:
            repo, endpoint = self.address.repo, self._settings.endpoint
            try:
                retries = self._retries(f"the revision of {repo}")
                return commit_of(
                    self._client, endpoint, repo, self._revision, retries, self._refusal
                )
            except DownloadError as error:
                self._unless_unreached(error)
        commit = self._cache.commit_of(self._revision)
        if commit is None:
            raise self._not_cached()
        if self.why_offline and not self._settings.offline:
            logger.warning("%s: the cache's commit %s is used", self.why_offline, commit)
        return commit

    def _unless_unreached(self, error: DownloadError) -> None:
        """Go on with the cache where the hub is down; any other failure is raised."""
        if error.code not in ("E_OFFLINE", "E_TIMEOUT"):
            raise error
        self._go_offline(error.message)
        self._unreached = error

    _unreached: DownloadError | None = None

    def _not_cached(self) -> DownloadError:
        found = DownloadError(
            f"{show(self.address.repo)} at {show(self._revision)} is not in the cache "
            f"{show_path(self._settings.cache)}; {self.why_offline}",
            code="E_OFFLINE",
            detail={"repo": self.address.repo, "revision": self._revision, "missing": []},
            hint="load once while online, or give the folder of a copy",
        )
        found.__cause__ = self._unreached
        return found

    def _find_files(self) -> list[FileInfo]:
        """The commit's files; without any listing, those of the cache."""
        entries = self._cache.listing(self.commit)
        if entries is None and not self.offline:
            repo, endpoint = self.address.repo, self._settings.endpoint
            try:
                retries = self._retries(f"the file list of {repo}")
                entries = fetch_listing(
                    self._client, endpoint, repo, self.commit, retries, self._refusal
                )
            except DownloadError as error:
                self._unless_unreached(error)
        if entries is not None:
            self._entries = {entry.name: entry for entry in entries}
            return [FileInfo(entry.name, entry.size, entry.sha256) for entry in entries]
        folder = self._folder()
        if not folder.is_dir():
            raise self._not_cached()
        return files_below(folder)

    def _retries(self, what: str) -> Retries:
        return Retries(what, None, Deadline(self.load_config.network_deadline))

    def _refusal(self, reply: Reply) -> LoadkitError:
        return self.refused(reply, "")

    def refused(self, reply: Reply, name: str) -> LoadkitError:
        return refusal(
            reply,
            name,
            repo=self.address.repo,
            revision=self._revision,
            endpoint=shown_source(self._settings.endpoint),
            token=self._settings.token,
        )

    # -- one file ----------------------------------------------------------------------------------

    def _folder(self) -> Path:
        return self._cache.snapshot(self.commit)

    def _has(self, name: str) -> bool:
        entry = self._entries.get(name)
        if entry is not None:
            return self._cache.has(self.commit, entry)
        return name in self._infos and Path(self._folder(), name).is_file()

    def url_of(self, name: str) -> str:
        path = quote(self._prefix + name)
        return f"{self._settings.endpoint}/{self.address.repo}/resolve/{self.commit}/{path}"

    def check(self, name: str, reply: Reply) -> None:
        """The hub's first answer for a file is about the very bytes that its listing names.

        Raises:
            DownloadError: another commit, another size, or an ETag that is not the digest.
        """
        entry = self._entries[self._prefix + name]
        said = reply.hops[0] if reply.hops else reply.headers
        etag = said.get("X-Linked-Etag", None if reply.hops else said.get("ETag"))
        size, commit = said.get("X-Linked-Size"), said.get("X-Repo-Commit")
        problem = ""
        if etag is not None and etag.removeprefix("W/").strip('"') not in (entry.oid, entry.blob):
            problem = f"sends the ETag {printable(etag, 80)}; the listing says {entry.oid}"
        elif commit is not None and commit != self.commit:
            problem = f"sends commit {printable(commit, 60)}; {self.commit} was asked for"
        elif size is not None and size != str(entry.size):
            problem = f"sends {printable(size, 30)} bytes; the listing says {entry.size}"
        if problem:
            raise DownloadError(
                f"{show(entry.name)}: the hub {problem}",
                file=entry.name,
                hint="the hub, or a mirror of it, is at fault",
            )

    def _before_fetching(self) -> None:
        self._cache.remember(self._revision, self.commit, list(self._entries.values()))

    def _fetch(self, name: str, landed: Callable[[int], None]) -> None:
        entry = self._entries[name]
        seconds = self.load_config.network_deadline

        def stream(start: int, take: Callable[[Buffer], object]) -> None:
            inside = name.removeprefix(self._prefix)
            self._transfers.fetch(inside, start, entry.size, Pin(entry.size), take)

        fetch_blob(self._cache, self.commit, entry, stream, seconds, landed)
