"""``http://`` and ``https://``: one file, or a folder whose files are guessed by their names.

The web has no listings. A folder is what its index or manifest names, and else what of the usual
names is there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from loadkit.errors import CheckpointError, DownloadError, PathError, ReadError
from loadkit.json_safe import parse_json
from loadkit.manifest import MANIFEST
from loadkit.network.answers import Pin, Transport
from loadkit.network.remote_file import BLOCK, RemoteFile
from loadkit.sources.base import FileInfo
from loadkit.sources.local import SIDE_FILES
from loadkit.sources.paths import check_name
from loadkit_remote.address import Address
from loadkit_remote.source import FILE_SUFFIXES, MAX_LISTED, RemoteSource
from loadkit_remote.web_transport import WebTransport

__all__ = ["HttpSource"]

INDEXES = (
    "model.safetensors.index.json",
    "consolidated.safetensors.index.json",
    "pytorch_model.bin.index.json",
)
WEIGHTS = (
    "model.safetensors",
    "consolidated.safetensors",
    "pytorch_model.bin",
    "model.gguf",
    "model.tensors",
    ".metadata",
    "__0_0.distcp",
)
_HEADS = frozenset({*INDEXES, *WEIGHTS, MANIFEST, "config.json", "params.json"})
MAX_INDEX = 100_000_000  # bytes


class HttpSource(RemoteSource):
    """A file or a folder on a web server that serves ranges.

    A query (``?...``: a presigned address) stays with every file's address. A password in the URI
    goes to its own host alone.
    """

    def make_transport(self, uri: str) -> Transport:
        address, last = Address.of(uri)
        if last.endswith(FILE_SUFFIXES):
            self.single = last
        elif last:
            address = address.folder(last)
        if self.load_config.subfolder and self.single is None:
            for part in self.load_config.subfolder.split("/"):
                address = address.folder(part)
        return WebTransport(address, self.load_config.network_timeout)

    def look(self, name: str) -> tuple[Pin, bytes]:
        # Of what is read anyway the start comes along; of the rest one byte tells that it is there.
        weights = name in _HEADS or name.endswith(FILE_SUFFIXES)
        return self._transfers.first(name, BLOCK if weights else 1)

    def find(self) -> list[FileInfo]:
        """The files that are there of those that could be.

        Raises:
            PathError: there is no such file.
            DownloadError: the server, or the way to it, failed.
        """
        if self.single is not None:
            try:
                found = {self.single: self.remote(self.single)}
            except ReadError as error:
                if error.errno is None:
                    raise
                raise PathError(error.message, file=self.single, hint=error.hint) from None
            found |= self._besides(sorted(SIDE_FILES))
            return _infos(found.values())
        found = self.side_by_side(sorted({*INDEXES, *WEIGHTS, MANIFEST, *SIDE_FILES}))
        found |= self.side_by_side(sorted(self._named(found) - found.keys()))
        return _infos(found.values())

    def _besides(self, names: list[str]) -> dict[str, RemoteFile]:
        """What lies beside one file; a signature for that file alone opens nothing else."""
        try:
            return self.side_by_side(names)
        except DownloadError as error:
            if error.code != "E_AUTH":
                raise
            return {}

    def _named(self, found: dict[str, RemoteFile]) -> set[str]:
        """The files that the indexes and the manifest name; what is wrong with them shows later."""
        names: set[str] = set()
        for name in INDEXES:
            weight_map = _content(found.get(name)).get("weight_map")
            names |= set(_texts(weight_map.values() if isinstance(weight_map, dict) else ()))
        files = _content(found.get(MANIFEST)).get("files")
        names |= set(_texts(files if isinstance(files, dict) else ()))
        if len(names) > MAX_LISTED:
            raise self.too_many()
        return {name for name in names if _is_plain(name)}


def _infos(files: Iterable[RemoteFile]) -> list[FileInfo]:
    return [FileInfo(file.name, file.size) for file in files]


def _content(file: RemoteFile | None) -> dict[str, Any]:
    """A JSON file's object; empty where it is none."""
    if file is None or file.size > MAX_INDEX:
        return {}
    data = file.read(0, file.size)
    try:
        found = parse_json(data, file=file.name, max_bytes=MAX_INDEX)
    except CheckpointError:
        return {}
    return found if isinstance(found, dict) else {}


def _texts(values: Iterable[Any]) -> Iterable[str]:
    return (value for value in values if isinstance(value, str))


def _is_plain(name: str) -> bool:
    try:
        check_name(name)
    except PathError:
        return False
    return True
