"""A repository of some hub as a source: which file is where, and when it is fetched."""

from __future__ import annotations

import errno
import logging
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from loadkit.errors import DownloadError, LoadkitError, PathError, ReadError
from loadkit.file_checks import show
from loadkit.network.answers import Pin
from loadkit.network.remote_file import RemoteFile
from loadkit.network.transfer import Transfers
from loadkit.progress import Progress
from loadkit.sources.base import File, FileInfo, Source
from loadkit.sources.local import LISTED_DEPTH, SIDE_FILES, LocalFile, LocalSource
from loadkit.sources.paths import check_name
from loadkit_hub.choice import belongs, files_of_index, find_quant, is_small, parted, weight_names
from loadkit_hub.hub_transport import HubTransport

if TYPE_CHECKING:
    from loadkit.config import LoadConfig
    from loadkit.network.http_client import HttpClient, Reply
    from loadkit_hub.address import Address

__all__ = ["Repository"]

logger = logging.getLogger(__name__)

WORKERS = 6  # files that are fetched at once
_INDEX = ".index.json"


class Repository(Source):
    """One commit of a repository. Its files are read from a local copy, or else by ranges.

    Attributes:
        single: the one file that was named, relative to the root; None: the folder.
        offline: nothing is asked for any more.
        why_offline: in words.
    """

    load_options: ClassVar[frozenset[str]] = frozenset(
        {"revision", "stream", "network_timeout", "network_deadline"}
    )
    offline: bool = False
    why_offline: str = ""

    def __init__(self, uri: str, load_config: LoadConfig, address: Address) -> None:
        super().__init__(uri, load_config)
        self.address = address
        self.single: str | None = None
        self._prefix = ""
        self._infos: dict[str, FileInfo] = {}  # by their name in the repository
        self._files: dict[str, File] = {}  # by their name relative to the root
        self._adopted: set[str] = set()
        self._here: LocalSource | None = None
        self._lock = threading.RLock()

    # -- what a hub says ---------------------------------------------------------------------------

    @abstractmethod
    def _folder(self) -> Path:
        """The local copy's folder, which may not be there yet."""

    @abstractmethod
    def _has(self, name: str) -> bool:
        """Whether the local copy holds a file, whole as far as its size tells."""

    @abstractmethod
    def url_of(self, name: str) -> str:
        """The address of a file, by its name relative to the root."""

    @abstractmethod
    def refused(self, reply: Reply, name: str) -> LoadkitError:
        """The error for an answer that is no success; ``name`` is "" for the repository itself."""

    def check(self, name: str, reply: Reply) -> None:
        """Look at an answer that a file's own address led to; raises if it is wrong."""

    @abstractmethod
    def _fetch(self, name: str, landed: Callable[[int], None]) -> None:
        """Have one file in the local copy."""

    def _ask(self, client: HttpClient) -> None:
        """Ask this client for ranges from now on; it is closed with the source."""
        self._transfers = Transfers(HubTransport(client, self), self.load_config)

    @property
    def bytes_fetched(self) -> int:  # type: ignore[override]  # counted elsewhere
        """Bytes of files that arrived; listings are not counted."""
        return self._transfers.nbytes

    def _before_fetching(self) -> None:
        """Called once before files are fetched."""

    # -- the root ----------------------------------------------------------------------------------

    def _settle(self, infos: Sequence[FileInfo]) -> None:
        """Take in the commit's files, and find the root that the address names.

        Raises:
            PathError: it names no folder and no file of the commit.
            NoWeightsError: no GGUF file is the one that it names.
        """
        self._infos = {info.name: info for info in infos}
        path = self.address.path
        if path in self._infos:
            self._prefix, self.single = parted(path)
        elif path:
            self._prefix = f"{path}/"
            if not any(name.startswith(self._prefix) for name in self._infos):
                raise self._no_folder(path)
        if self.address.quant:
            inside = [name for name in self._infos if name.startswith(self._prefix)]
            found = find_quant(inside, self.address.quant, self.address.repo)
            self._prefix, self.single = parted(found)

    def _no_folder(self, path: str) -> PathError:
        folders = sorted({name.partition("/")[0] for name in self._infos if "/" in name})
        some = ", ".join(map(show, folders[:10])) if folders else "none"
        return PathError(
            f"{show(self.address.repo)} has no folder or file {show(path)}; its folders: {some}",
            file=path,
            detail={"folders": folders},
        )

    def list(self) -> Sequence[FileInfo]:
        """Every file of the root, two folders deep; of a file that was named, what goes with it."""
        found = []
        for full, info in self._infos.items():
            name = full.removeprefix(self._prefix)
            if not full.startswith(self._prefix) or name.count("/") > LISTED_DEPTH:
                continue
            if self.single is None or name in SIDE_FILES or belongs(name, self.single):
                found.append(replace(info, name=name))
        return sorted(found, key=lambda info: info.name)

    # -- files -------------------------------------------------------------------------------------

    def open(self, name: str) -> File:
        """Open a file: of the local copy if it is there, else one that is read by ranges.

        Raises:
            PathError: the name leads out of the repository, or its local file does.
            ReadError: there is no such file.
            DownloadError: E_OFFLINE, it is not there and nothing may be asked; lists all that is
                missing.
        """
        with self._lock:
            if name not in self._files:
                self._files[name] = self._opened(check_name(name))
            return self._files[name]

    def _opened(self, name: str) -> File:
        full = self._prefix + name
        info = self._infos.get(full)
        if info is None:
            raise ReadError(
                f"{show(self.address.repo)} has no file {show(full)}",
                errno=errno.ENOENT,
                file=name,
            )
        if self._has(full):
            return self._local(name)
        if self.offline:
            raise self._not_here([name])
        return RemoteFile(name, Pin(info.size), b"", self._transfers)

    def _local(self, name: str) -> LocalFile:
        """A file of the local copy; links are followed to its blobs and no further."""
        if self._here is None:
            config = replace(self.load_config, subfolder=None)
            self._here = LocalSource(self._folder() / self._prefix, config)
        file = self._here.open(name)
        if not isinstance(file, LocalFile):
            raise PathError(f"{show(name)} is no file of this machine", file=name)
        return file

    def adopt(self, file: File) -> None:
        with self._lock:
            self._files[file.name] = file
            self._adopted.add(file.name)

    def opened(self) -> Sequence[File]:
        """The files that are open, by name."""
        with self._lock:
            return [self._files[name] for name in sorted(self._files)]

    def make_local(self, names: Sequence[str]) -> None:
        """Have the files of a load in the local copy, and the small ones beside them.

        Raises:
            DownloadError: the hub failed; E_OFFLINE, files are missing and it may not be asked.
            IntegrityError: a file came with another digest than the hub lists.
            WriteError: there is no room, or no right to write.
        """
        names = [name for name in names if name not in self._adopted]
        if self.load_config.stream or not names:
            return
        missing = [name for name in names if not self._has(self._prefix + name)]
        if missing and self.offline:
            raise self._not_here(missing)
        if missing:
            small = [info.name for info in self.list() if is_small(info, self.load_config)]
            self._fetch_all(dict.fromkeys([*missing, *small]))
        with self._lock:
            for name, file in self._files.items():
                if isinstance(file, RemoteFile) and not file.local and self._has_name(name):
                    file.become(self._local(name))

    def _has_name(self, name: str) -> bool:
        return self._has(self._prefix + name)

    def _fetch_all(self, names: Sequence[str] | dict[str, None]) -> None:
        """Fetch files side by side; the first failure ends the others."""
        wanted = [self._prefix + name for name in names if not self._has_name(name)]
        total = sum(self._infos[name].size for name in wanted)
        self._before_fetching()
        logger.info("fetching %d file(s), %d bytes, of %s", len(wanted), total, self.uri)
        ended = threading.Event()
        shown = self.load_config.use_tqdm_on_load
        with Progress(total, shown=shown, what="downloading") as progress:

            def landed(nbytes: int) -> None:
                if ended.is_set():
                    raise _Ended
                progress.landed(nbytes)

            with ThreadPoolExecutor(min(WORKERS, len(wanted)) or 1) as pool:
                try:
                    jobs = [pool.submit(self._fetch, name, landed) for name in wanted]
                    done, _ = wait(jobs, return_when=FIRST_EXCEPTION)
                    for job in done:
                        job.result()
                except BaseException:
                    ended.set()
                    pool.shutdown(cancel_futures=True)
                    raise

    def _not_here(self, names: Sequence[str]) -> DownloadError:
        """The error of a local copy that is not whole; lists all that a load would miss."""
        weights = self._needed_weights()
        missing = {self._prefix + name for name in [*names, *weights] if not self._has_name(name)}
        some = ", ".join(show(name) for name in sorted(missing)[:20])
        if len(missing) > 20:
            some += f" and {len(missing) - 20} more"
        return DownloadError(
            f"{len(missing)} file(s) of {self.uri} are not on this machine: {some}; "
            f"{self.why_offline}",
            code="E_OFFLINE",
            file=names[0],
            detail={"missing": sorted(missing), "folder": str(self._folder())},
            hint="load once while online, or give the folder of a complete copy",
        )

    def _needed_weights(self) -> Sequence[str]:
        """Weight files by the listing; those that an index names, where one is there."""
        listing = self.list()
        names = weight_names(listing, self.load_config)
        if self.single is not None:
            return [info.name for info in listing if belongs(info.name, self.single)]
        for info in listing:
            kind = info.name.removesuffix(_INDEX)
            if kind == info.name or kind not in ("model.safetensors", "pytorch_model.bin"):
                continue
            if not self._has_name(info.name) or not any(n.endswith(kind[-4:]) for n in names):
                continue
            with suppress(LoadkitError):  # the loader says what is wrong with it
                return files_of_index(self.open(info.name).read(0, info.size), info.name)
        return names

    def close(self) -> None:
        """Close every file this source opened."""
        with self._lock:
            files, self._files = self._files, {}
            here, self._here = self._here, None
        for file in files.values():
            file.close()
        if here is not None:
            here.close()
        self._transfers.transport.close()


class _Ended(Exception):  # noqa: N818
    """Another file's fetching has failed."""
