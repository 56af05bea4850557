"""What the remote sources share: open files, listings that end, and downloads before a load."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

from loadkit.config import LoadConfig
from loadkit.errors import DownloadError, OptionError, PathError, ReadError
from loadkit.file_checks import show
from loadkit.network.answers import Pin, Transport
from loadkit.network.remote_file import RemoteFile
from loadkit.network.transfer import Transfers
from loadkit.progress import Progress
from loadkit.sources.base import File, FileInfo, Source
from loadkit.sources.local_file import LocalFile
from loadkit.sources.paths import check_name
from loadkit.sources.shown import shown_source
from loadkit_remote.cache import Kept, folder_of
from loadkit_remote.download import download

__all__ = ["FILE_SUFFIXES", "MAX_LISTED", "RemoteSource"]

MAX_LISTED = 10_000  # files; a checkpoint has a few hundred
LISTED_DEPTH = 2  # folders below the root
THREADS = 8  # requests at once, where ``num_threads`` does not say
# What a URI that ends so names is one file; anything else is a folder.
FILE_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".tensors", ".distcp")


class RemoteSource(Source):
    """Files that are reached by a transport.

    Args:
        uri: what the user gave, secrets and all; ``uri`` of the source has none.
        load_config: ``stream``, ``cache_dir``, ``download_dir``, ``subfolder``, ``num_threads``,
            ``network_timeout`` and ``network_deadline`` count.

    Attributes:
        single: the name of the one file that the URI names; None for a folder.

    Raises:
        OptionError: the URI is none, or ``stream`` and ``download_dir`` are both given.
    """

    load_options: ClassVar[frozenset[str]] = frozenset(
        {"network_deadline", "network_timeout", "stream"}
    )
    single: str | None = None

    def __init__(self, uri: str, load_config: LoadConfig) -> None:
        super().__init__(shown_source(uri), load_config)
        if load_config.stream and load_config.download_dir is not None:
            raise OptionError(
                "LoadConfig.stream keeps no local copy, and LoadConfig.download_dir says where to",
                detail={"options": ["stream", "download_dir"]},
                hint="give one of them",
            )
        self._lock = threading.Lock()
        self._listing_lock = threading.Lock()  # held while files are opened
        self._open: dict[str, RemoteFile] = {}
        self._adopted: dict[str, File] = {}
        self._listing: list[FileInfo] | None = None
        self._given = uri
        self._transfers = Transfers(self.make_transport(uri), load_config)

    def make_transport(self, uri: str) -> Transport:
        """The way to the files; sets ``single``."""
        raise NotImplementedError

    def find(self) -> list[FileInfo]:
        """The listing, made once."""
        raise NotImplementedError

    def look(self, name: str) -> tuple[Pin, bytes]:
        """What a file is, and as much of its start as that took.

        Raises:
            ReadError: ENOENT, there is no such file.
            DownloadError: the server, or the way to it, failed.
        """
        raise NotImplementedError

    @property
    def bytes_fetched(self) -> int:  # type: ignore[override]  # counted elsewhere
        """Bytes of files that arrived; listings are not counted."""
        return self._transfers.nbytes

    @property
    def threads(self) -> int:
        """Requests at once, at most."""
        return self.load_config.num_threads or THREADS

    def list(self) -> Sequence[FileInfo]:
        with self._listing_lock:
            if self._listing is None:
                self._listing = sorted(self.find(), key=lambda info: info.name)
            return self._listing

    def open(self, name: str) -> File:
        """Open a file of the root, or give one that was adopted; later calls give the same one.

        Raises:
            LoadkitError: as ``remote``.
        """
        with self._lock:
            adopted = self._adopted.get(name)
        return self.remote(name) if adopted is None else adopted

    def remote(self, name: str) -> RemoteFile:
        """Open a file of the root, once; later calls give the same one.

        Raises:
            PathError: the name leads out of the root.
            ReadError: there is no such file.
            DownloadError: the server, or the way to it, failed.
        """
        with self._lock:
            found = self._open.get(name)
        if found is not None:
            return found
        pin, head = self.look(check_name(name))
        with self._lock:
            made = RemoteFile(name, pin, head, self._transfers)
            return self._open.setdefault(name, made)

    def adopt(self, file: File) -> None:
        with self._lock:
            self._adopted[file.name] = file

    def opened(self) -> Sequence[File]:
        with self._lock:
            files = {**self._open, **self._adopted}
        return [files[name] for name in sorted(files)]

    def side_by_side(self, names: Sequence[str]) -> dict[str, RemoteFile]:
        """Those of the files that are there, opened, several at once after the first.

        So a server that is not reached is asked for one. Files that may not be read count as
        absent: many servers say that of any name they lack.

        Raises:
            DownloadError: E_AUTH, none is there and some may not be read; and as ``open``.
        """
        found = [self._if_there(name) for name in names[:1]]
        with ThreadPoolExecutor(self.threads, thread_name_prefix="loadkit-remote") as pool:
            found += pool.map(self._if_there, names[1:])
        files = {file.name: file for file in found if isinstance(file, RemoteFile)}
        denied = [error for error in found if isinstance(error, DownloadError)]
        if denied and not files:
            raise denied[0]
        return files

    def _if_there(self, name: str) -> RemoteFile | DownloadError | None:
        try:
            return self.remote(name)
        except ReadError as error:
            if error.errno is None:
                raise
            return None
        except DownloadError as error:
            if error.code != "E_AUTH":
                raise
            return error

    def make_local(self, names: Sequence[str]) -> None:
        if self.load_config.stream:
            return
        remote = [self.remote(name) for name in names if name not in self._adopted]
        files = [file for file in remote if not file.local]
        folder = folder_of(self.load_config, self.uri)
        total = sum(file.size for file in files)
        shown = self.load_config.use_tqdm_on_load
        with Progress(total, shown=shown, what="downloading") as progress:
            for file in files:
                kept = Kept(folder, file.name)
                download(kept, file.pin, self._transfers, self.threads, progress.landed)
                file.become(LocalFile(file.name, str(kept.path)))

    def too_many(self) -> PathError:
        """The error of a place that is no checkpoint's folder."""
        return PathError(
            f"{show(self.uri)} holds more than {MAX_LISTED} files",
            hint="name the folder of the checkpoint itself",
        )

    def close(self) -> None:
        with self._lock:
            files = [*self._open.values(), *self._adopted.values()]
            self._open, self._adopted = {}, {}
        for file in files:
            file.close()
        self._transfers.transport.close()
