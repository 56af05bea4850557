"""``modelscope://org/name[@revision][:quantisation][/folder]``, through ModelScope's own client.

Its listing and its downloads are used; ranges are read here. ModelScope names no commits: what a
file holds is told by the SHA-256 of its listing.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from loadkit.errors import DownloadError, IntegrityError, LoadkitError, NotInstalledError, PathError
from loadkit.file_checks import show
from loadkit.network import make_client
from loadkit.network.addresses import origin_of
from loadkit.sources.base import FileInfo
from loadkit.sources.paths import check_name
from loadkit.sources.shown import shown_source
from loadkit.text import printable
from loadkit_hub.address import parse_address
from loadkit_hub.listing import MAX_FILES, MAX_SIZE, SHA256
from loadkit_hub.refusals import refusal
from loadkit_hub.repository import Repository
from loadkit_hub.settings import cache_folder
from loadkit_hub.walk import files_below

if TYPE_CHECKING:
    from loadkit.config import LoadConfig
    from loadkit.network.http_client import Reply

__all__ = ["ModelScopeSource"]

logger = logging.getLogger(__name__)

MASTER = "master"
_INSTALL = 'pip install "loadkit-hub[modelscope]"'


class ModelScopeSource(Repository):
    """A model repository of ModelScope.

    Raises:
        OptionError: the address or the revision cannot be.
        NotInstalledError: ModelScope's client or ``urllib3`` is missing.
        PathError: there is no such repository, revision or folder.
        DownloadError: E_AUTH, it may not be read; E_OFFLINE, it is not in the cache and ModelScope
            is not reached; otherwise ModelScope answers wrong or late.
    """

    def __init__(self, uri: str, load_config: LoadConfig) -> None:
        address = parse_address(uri, "modelscope", load_config.revision, load_config.subfolder)
        super().__init__(uri, load_config, address)
        if find_spec("modelscope_hub") is None:
            raise NotInstalledError(
                "modelscope:// needs the library 'modelscope-hub', which is not installed",
                detail={"library": "modelscope-hub", "extra": "hub"},
                hint=_INSTALL,
            )
        from modelscope_hub import HubApi, HubConfig

        config: Any = HubConfig()
        self._api: Any = HubApi(config)
        self._token: str | None = config.token or None
        self._endpoint: str = config.endpoint.rstrip("/")
        self._revision = address.revision or MASTER
        self._cache = cache_folder(load_config) or Path(config.cache_dir)
        credentials = {}
        if self._token:
            credentials[origin_of(self._endpoint)] = {"Authorization": f"Bearer {self._token}"}
        self._ask(make_client(load_config.network_timeout, credentials))
        try:
            self._settle(self._find_files())
        except BaseException:
            self.close()
            raise

    def _find_files(self) -> list[FileInfo]:
        """The revision's files; where ModelScope is not reached, those of the cache."""
        try:
            with self._failures(""):
                found = self._api.list_repo_files(
                    self.address.repo, "model", revision=self._revision, recursive=True
                )
        except DownloadError as error:
            if error.code not in ("E_TIMEOUT", "E_OFFLINE"):
                raise
            self.offline, self.why_offline = True, error.message
            if not self._folder().is_dir():
                raise
            logger.warning("%s: the files of the cache are used", error.message)
            return files_below(self._folder())
        files = [item for item in found if not item.is_dir]
        if len(files) > MAX_FILES:
            raise self._wrong(f"lists more than {MAX_FILES} files")
        return [self._info(item) for item in files]

    def _info(self, item: Any) -> FileInfo:
        """One item of a listing, checked."""
        name = check_name(item.path)
        size, digest = item.size, item.sha256 or None
        if not isinstance(size, int) or not 0 <= size <= MAX_SIZE:
            raise self._wrong(f"says of {printable(name)} a size that cannot be")
        if digest is not None and not (isinstance(digest, str) and SHA256.fullmatch(digest)):
            raise self._wrong(f"says of {printable(name)} a digest that cannot be")
        return FileInfo(name, size, digest)

    def _wrong(self, what: str) -> DownloadError:
        return DownloadError(f"ModelScope's listing of {show(self.address.repo)} {what}")

    @contextmanager
    def _failures(self, file: str) -> Iterator[None]:
        """Turns what the client raises into errors of ours, which hold no token."""
        from modelscope_hub import errors

        where = f"{show(file)} of {show(self.address.repo)}" if file else show(self.address.repo)
        who = "this token" if self._token else "anybody"
        try:
            yield
        except (errors.AuthenticationError, errors.PermissionDeniedError):
            raise DownloadError(
                f"ModelScope does not let {who} read {where}",
                code="E_AUTH",
                hint="set MODELSCOPE_API_TOKEN to a token that may",
            ) from None
        except errors.NotExistError:
            raise PathError(
                f"ModelScope has no {where} at {show(self._revision)}",
                file=file or None,
                hint="check its name" + ("" if self._token else ", or set MODELSCOPE_API_TOKEN"),
            ) from None
        except errors.RequestTimeoutError:
            raise DownloadError(
                f"ModelScope did not answer in time for {where}", code="E_TIMEOUT"
            ) from None
        except errors.NetworkError:
            raise DownloadError(
                f"ModelScope cannot be reached for {where}",
                code="E_OFFLINE",
                hint="see whether this machine is online",
            ) from None
        except errors.FileIntegrityError:
            raise self._damaged(file) from None
        except errors.HubError as error:
            text = str(error)
            if self._token:
                text = text.replace(self._token, "***")
            raise DownloadError(f"ModelScope failed for {where}: {printable(text, 300)}") from None

    # -- one file ----------------------------------------------------------------------------------

    def _folder(self) -> Path:
        owner, _, name = self.address.repo.partition("/")
        return self._cache / "models" / f"{owner}--{name}" / "snapshots" / self._revision

    def _has(self, name: str) -> bool:
        info = self._infos.get(name)
        path = Path(self._folder(), name)
        return info is not None and path.is_file() and path.stat().st_size == info.size

    def url_of(self, name: str) -> str:
        revision, path = quote(self._revision, safe=""), quote(self._prefix + name, safe="")
        return (
            f"{self._endpoint}/api/v1/models/{self.address.repo}/repo"
            f"?Revision={revision}&FilePath={path}"
        )

    def refused(self, reply: Reply, name: str) -> LoadkitError:
        found = refusal(
            reply,
            name,
            repo=self.address.repo,
            revision=self._revision,
            endpoint=shown_source(self._endpoint),
            token=self._token,
        )
        if found.code == "E_AUTH":
            found.hint = "set MODELSCOPE_API_TOKEN to a token that may read it"
        return found

    def _fetch(self, name: str, landed: Callable[[int], None]) -> None:
        info = self._infos[name]
        with self._failures(name):
            path = self._api.download_file(
                self.address.repo,
                "model",
                name,
                revision=self._revision,
                cache_dir=self._cache,
                expected_sha256=info.sha256,
                file_size=info.size,
            )
        found = Path(path)
        if found != Path(self._folder(), name) or not self._has(name):
            raise DownloadError(f"ModelScope's client left {show(name)} elsewhere or unfinished")
        if info.sha256 is not None:
            with found.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != info.sha256:
                    raise self._damaged(name)
        self._transfers.count(info.size)
        landed(info.size)

    def _damaged(self, name: str) -> IntegrityError:
        return IntegrityError(
            f"{show(name)} came from ModelScope with another SHA-256 or size than it lists",
            file=name,
            hint="fetch it again",
        )
