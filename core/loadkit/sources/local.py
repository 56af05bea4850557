"""A folder or one file on this machine: the source of a plain path and of ``file://``."""

from __future__ import annotations

import logging
import os
import re
import stat
import threading
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from loadkit.errors import PathError
from loadkit.file_checks import show, show_path
from loadkit.sources.base import File, FileInfo, Source
from loadkit.sources.gguf_choice import chosen_file
from loadkit.sources.local_file import LocalFile, read_error
from loadkit.sources.paths import (
    allowed_roots,
    blob_roots,
    check_name,
    expand_path,
    resolve,
    stat_root,
)

if TYPE_CHECKING:
    from loadkit.config import LoadConfig

__all__ = ["LocalFile", "LocalSource"]

logger = logging.getLogger(__name__)

MAX_LISTED = 100_000  # entries; a checkpoint has a few hundred
LISTED_DEPTH = 2  # folders below the root
# What belongs to a single file that was named as the source, if it lies beside it.
SIDE_FILES = frozenset(
    {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "hf_quant_config.json",
        "merges.txt",
        "params.json",
        "quantization_config.json",
        "quantize_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
        "vocab.txt",
    }
)
_SHA256 = re.compile(r"[0-9a-f]{64}")
# A folder of such a name is listed as if it were a file, so that opening it tells what is wrong.
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


class LocalSource(Source):
    """A folder, or one file of it, on this machine.

    The root is resolved first. A link inside is followed only to a regular file under the root,
    under the blob root of a Hugging Face hub cache the root lies in, or under one of
    ``LoadConfig.allowed_roots``. A single file that the caller named may be a link to anywhere.
    ``folder:Q8_0`` names the GGUF model of a folder that has this word in its file's name.

    Raises:
        PathError: the path does not exist, loops, or is neither a folder nor a regular file.
    """

    def __init__(self, uri: str | os.PathLike[str], load_config: LoadConfig) -> None:
        super().__init__(os.fspath(uri), load_config)
        path = expand_path(uri)
        subfolder = load_config.subfolder
        if subfolder:
            path = path / check_name(subfolder.rstrip("/"))
        path = chosen_file(path)
        found = stat_root(path, self.uri)
        self.single: str | None = None
        self._named = ""
        if not stat.S_ISDIR(found.st_mode):
            self.single, self._named, path = path.name, resolve(path, path.name), path.parent
        self.root = resolve(path, self.uri)
        self._blobs = [os.path.realpath(folder) for folder in blob_roots(self.root)]
        self._allowed = [self.root, *blob_roots(self.root), *allowed_roots(load_config)]
        self._open: dict[str, File] = {}
        self._lock = threading.Lock()
        if self.single is not None:
            self.open(self.single)

    # -- listing ---------------------------------------------------------------------------------

    def list(self) -> Sequence[FileInfo]:
        """Every file under the root, two folders deep, sorted by name; folders named ``.x`` not.

        Links, FIFOs and the like are listed too: ``open`` says what is wrong with them. A single
        file is listed with the known side files beside it (config.json, tokenizer.json, ...).

        Raises:
            ReadError: the root cannot be read.
            PathError: the root holds more than ``MAX_LISTED`` entries.
        """
        if self.single is not None:
            names = [self.single, *(SIDE_FILES - {self.single})]
            return sorted(
                (
                    FileInfo(n, self._size(n), self._sha256(n))
                    for n in names
                    if Path(self.root, n).is_file()
                ),
                key=lambda info: info.name,
            )
        found = list(islice(self._walk(), MAX_LISTED + 1))
        if len(found) > MAX_LISTED:
            raise PathError(
                f"{show_path(self.uri)} holds more than {MAX_LISTED} files",
                hint="name the folder of the checkpoint itself",
            )
        return sorted(found, key=lambda info: info.name)

    def _walk(self, folder: str = "", depth: int = LISTED_DEPTH) -> Iterator[FileInfo]:
        folders: list[str] = []
        try:
            with os.scandir(Path(self.root, folder)) as entries:
                for entry in entries:
                    name = f"{folder}/{entry.name}" if folder else entry.name
                    if _is_folder(entry):
                        folders.append(name)
                    else:
                        digest = self._sha256(name) if entry.is_symlink() else None
                        yield FileInfo(name, self._size(name), digest)
        except OSError as error:
            if not folder:
                raise read_error(error, self.uri, "list") from error
            logger.debug("cannot list %s: %s", show(folder), error)
        if depth:
            for name in sorted(folders):
                if not name.rpartition("/")[2].startswith("."):
                    yield from self._walk(name, depth - 1)

    def _size(self, name: str) -> int:
        """The size of a regular file in bytes; 0 for anything that ``open`` will refuse."""
        try:
            found = Path(self.root, name).stat()
        except OSError:
            return 0
        return found.st_size if stat.S_ISREG(found.st_mode) else 0

    def _sha256(self, name: str) -> str | None:
        """What the hub says a file of its cache holds: large files lie in blobs named after it."""
        if not self._blobs:
            return None
        target = os.path.realpath(Path(self.root, name))
        folder, _, digest = target.rpartition("/")
        return digest if folder in self._blobs and _SHA256.fullmatch(digest) else None

    # -- opening ---------------------------------------------------------------------------------

    def open(self, name: str) -> File:
        """Open a file of the root, once; later calls give the same one.

        Raises:
            PathError: the name or a link leads out of the root, loops, or is no regular file.
            ReadError: there is no such file, or the operating system refuses to open it.
        """
        with self._lock:
            if name not in self._open:
                self._open[name] = LocalFile(name, self._inside(check_name(name)))
            return self._open[name]

    def _inside(self, name: str) -> str:
        """The resolved path of a name, if it stays where it may be."""
        path = Path(self.root, name)
        target = resolve(path, name)
        if target == self._named and name == self.single:
            return target
        if not any(Path(target).is_relative_to(root) for root in self._allowed):
            raise PathError(
                f"{show(name)} is a link to {show(target)}, outside of {show_path(self.root)}",
                file=name,
                detail={"target": target},
                hint="name its folder in LoadConfig.allowed_roots to allow it",
            )
        return target

    def adopt(self, file: File) -> None:
        with self._lock:
            self._open[file.name] = file

    def opened(self) -> Sequence[File]:
        """The files that are open, by name."""
        with self._lock:
            return [self._open[name] for name in sorted(self._open)]

    def close(self) -> None:
        """Close every file this source opened."""
        with self._lock:
            files, self._open = self._open, {}
        for file in files.values():
            file.close()


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether the listing goes into it instead of showing it; links to folders are not entered."""
    if entry.is_symlink():
        return False
    return entry.is_dir() and not entry.name.endswith(_WEIGHT_SUFFIXES)
