"""``mx://host:port/org/name[@revision][/folder]``: a model that a ModelExpress server holds."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from loadkit.errors import PathError, ReadError
from loadkit.file_checks import show, show_path
from loadkit.progress import Progress
from loadkit.sources.base import File, FileInfo, Source
from loadkit.sources.local import LISTED_DEPTH, SIDE_FILES, LocalFile, LocalSource
from loadkit.sources.paths import check_name
from loadkit_modelexpress.address import Address, parse_address
from loadkit_modelexpress.cache import Snapshot
from loadkit_modelexpress.served_file import ServedFile
from loadkit_modelexpress.server import ModelServer
from loadkit_modelexpress.settings import read_settings

if TYPE_CHECKING:
    from loadkit.config import LoadConfig

__all__ = ["ModelExpressSource"]

logger = logging.getLogger(__name__)

_SMALL = 16 << 20  # bytes; files beside the weights that are fetched with them
_START = 64 << 10  # bytes of a message where only a file's begin is wanted


class ModelExpressSource(Source):
    """One commit of a model on a server. Opening it has the server fetch the model.

    Files that lie in the cache's folder, in the hub's layout, are read there. Of others the begin
    can be read, and ``make_local`` fetches them whole: the protocol has no ranges and no
    checksums.

    Args:
        uri: an ``mx://`` address; or a repository's name, for a loader that names the server.
        load_config: ``revision``, ``subfolder``, ``cache_dir``, ``network_timeout`` and
            ``network_deadline`` count, and the options of load format ``modelexpress``.

    Attributes:
        commit: the commit that every file is of.
        model: its name on the server.

    Raises:
        OptionError: the address is none.
        NotInstalledError: the package modelexpress is missing.
        PathError: the server has no such model, revision or folder, or names files that lead out.
        DownloadError: E_AUTH, E_TIMEOUT or E_DOWNLOAD: the server, or the way to it, failed.
    """

    load_options: ClassVar[frozenset[str]] = frozenset(
        {"revision", "network_timeout", "network_deadline"}
    )

    def __init__(self, uri: str, load_config: LoadConfig) -> None:
        super().__init__(uri, load_config)
        address = parse_address(uri, load_config.revision, load_config.subfolder)
        self._asked = address.revision
        self._prefix = f"{address.path}/" if address.path else ""
        self._lock = threading.RLock()
        self._files: dict[str, File] = {}
        self._here: LocalSource | None = None
        self._starts: dict[str, bytes] = {}  # what was seen of files that nobody opened yet
        settings = read_settings(address, load_config)
        self.model = settings.model
        self._server = ModelServer(settings, load_config)
        try:
            commit = self._server.ensure(address.revision)
            self._infos = {info.name: info for info in self._server.files(commit)}
            self.commit = self._pin(commit)
            self._snapshot = Snapshot(settings.cache, self.model, self.commit)
            if settings.shared_storage:
                self._check_shared()
            self._check_folder(address)
        except BaseException:
            self._server.close()
            raise
        self.uri = replace(address, server=settings.server, revision=self.commit).shown()
        logger.info("%s: %d file(s)", self.uri, len(self._infos))

    # -- what is there -----------------------------------------------------------------------------

    def _pin(self, commit: str | None) -> str:
        """The commit: as the server said, else as the begin of a file says."""
        self._server.commit = commit
        if self._server.commit is None:
            named = self._infos.get(f"{self._prefix}config.json")
            info = named or min(self._infos.values(), key=lambda one: one.size)
            self._starts[info.name] = self._begin(info, 1)
        if self._server.commit is None:  # every listed file is empty
            raise PathError(f"{show(self.model)} has no file that holds anything")
        return self._server.commit

    def _begin(self, info: FileInfo, nbytes: int) -> bytes:
        found = self._starts.pop(info.name, b"")
        if len(found) < nbytes:
            found = self._server.start(info, nbytes, _START)
            with self._lock:
                self.bytes_fetched += len(found)
        return found

    def _check_shared(self) -> None:
        """With shared storage every file is in the folder already.

        Raises:
            PathError: names those that are not.
        """
        missing = [name for name, info in self._infos.items() if not self._snapshot.has(info)]
        if missing:
            raise PathError(
                f"shared_storage is set, and {len(missing)} of {len(self._infos)} file(s) are not "
                f"in {show_path(self._snapshot.folder)}: {', '.join(map(show, missing[:5]))}",
                file=missing[0],
                detail={"missing": missing, "folder": str(self._snapshot.folder)},
                hint="name the server's cache in cache_dir, or leave shared_storage out to have "
                "files sent",
            )

    def _check_folder(self, address: Address) -> None:
        if self._prefix and not any(name.startswith(self._prefix) for name in self._infos):
            raise PathError(
                f"{show(self.model)} has no folder {show(address.path)}", file=address.path
            )

    def list(self) -> Sequence[FileInfo]:
        found = []
        for full, info in self._infos.items():
            name = full.removeprefix(self._prefix)
            if full.startswith(self._prefix) and name.count("/") <= LISTED_DEPTH:
                found.append(replace(info, name=name))
        return sorted(found, key=lambda info: info.name)

    # -- files -------------------------------------------------------------------------------------

    def open(self, name: str) -> File:
        """Open a file: of the cache if it is there, else one whose begin can be read.

        Raises:
            PathError: the name leads out of the model, or its file in the cache does.
            ReadError: there is no such file.
        """
        with self._lock:
            if name not in self._files:
                self._files[name] = self._opened(check_name(name))
            return self._files[name]

    def _opened(self, name: str) -> File:
        info = self._infos.get(self._prefix + name)
        if info is None:
            raise ReadError(
                f"{show(self.model)} has no file {show(name)}", errno=errno.ENOENT, file=name
            )
        if self._snapshot.has(info):
            return self._local(name)
        return ServedFile(name, info.size, partial(self._begin, info))

    def _local(self, name: str) -> LocalFile:
        if self._here is None:
            config = replace(self.load_config, subfolder=None)
            self._here = LocalSource(self._snapshot.folder / self._prefix, config)
        file = self._here.open(name)
        if not isinstance(file, LocalFile):
            raise PathError(f"{show(name)} is no file of this machine", file=name)
        return file

    def opened(self) -> Sequence[File]:
        with self._lock:
            return [self._files[name] for name in sorted(self._files)]

    def make_local(self, names: Sequence[str]) -> None:
        """Have the files of a load in the cache, and the small ones beside them.

        Raises:
            LoadkitError: as ``Snapshot.fetch``.
        """
        wanted = [self._infos[self._prefix + name] for name in names]
        if wanted:
            small = [self._infos[self._prefix + info.name] for info in self.list() if _small(info)]
            wanted = list(dict.fromkeys([*small, *wanted]))
        missing = [info for info in wanted if not self._snapshot.has(info)]
        if missing:
            total = sum(info.size for info in missing)
            logger.info("fetching %d file(s), %d bytes, of %s", len(missing), total, self.uri)
            shown = self.load_config.use_tqdm_on_load
            with Progress(total, shown=shown, what="downloading") as progress:

                def landed(nbytes: int) -> None:
                    self.bytes_fetched += max(0, nbytes)
                    progress.landed(nbytes)

                seconds = self.load_config.network_deadline
                self._snapshot.fetch(missing, self._server, seconds, landed, self._asked)
        with self._lock:
            for name, file in self._files.items():
                here = self._snapshot.has(self._infos[self._prefix + name])
                if here and isinstance(file, ServedFile) and not file.local:
                    file.become(self._local(name))

    def close(self) -> None:
        with self._lock:
            files, self._files = self._files, {}
            here, self._here = self._here, None
        for file in files.values():
            file.close()
        if here is not None:
            here.close()
        self._server.close()


def _small(info: FileInfo) -> bool:
    """Whether a file goes with the weights: config, tokenizer, manifest."""
    named = info.name in SIDE_FILES or fnmatch(info.name, "*.json")
    return named and info.size <= _SMALL
