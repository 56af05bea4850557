"""A source seen as a folder: its files under names that no other source's files have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from loadkit.sources.base import File, FileInfo, Source

__all__ = ["MovedFile", "MovedSource"]


class MovedFile(File):
    """A file under another name; everything else is as ``file`` has it, now and later."""

    def __init__(self, file: File, name: str) -> None:
        self.file, self.name = file, name
        self.size = file.size

    @property
    def path(self) -> str | None:  # type: ignore[override]
        """Of the file; a remote one gets one when it is fetched."""
        return self.file.path

    @property
    def address(self) -> str | None:  # type: ignore[override]
        """Of the file."""
        return self.file.address

    @property
    def reader(self) -> str:  # type: ignore[override]
        """Of the file."""
        return self.file.reader

    @property
    def local(self) -> bool:
        return self.file.local

    def read(self, offset: int, nbytes: int) -> bytes:
        return self.file.read(offset, nbytes)

    def read_into(self, offset: int, into: memoryview) -> None:
        self.file.read_into(offset, into)

    def came(self, nbytes: int) -> None:
        self.file.came(nbytes)

    def fileno(self) -> int:
        return self.file.fileno()

    def identity(self) -> tuple[str, ...] | None:
        return self.file.identity()

    def check_unchanged(self) -> None:
        self.file.check_unchanged()

    def close(self) -> None:
        self.file.close()


class MovedSource(Source):
    """Another source's files, by their own names until ``move``, and in a folder from then on.

    Attributes:
        inner: the source; it becomes this one's own.
        folder: where its files are seen; "" is the root.
        loader: who read their headers.
        prefix: what is put before the names of their tensors.
    """

    loader: Any
    prefix: str = ""

    def __init__(self, inner: Source) -> None:
        super().__init__(inner.uri, inner.load_config)
        self.inner, self.folder, self.remarks = inner, "", inner.remarks
        self.single: str | None = getattr(inner, "single", None)
        self._files: dict[str, MovedFile] = {}

    @property
    def bytes_fetched(self) -> int:  # type: ignore[override]
        """Of the source."""
        return self.inner.bytes_fetched

    def move(self, folder: str) -> None:
        """See all files, those that are open too, in a folder."""
        self.folder = folder
        for name, file in self._files.items():
            file.name = self._seen(name)

    def list(self) -> Sequence[FileInfo]:
        return [replace(info, name=self._seen(info.name)) for info in self.inner.list()]

    def open(self, name: str) -> File:
        own = self._own(name)
        if own not in self._files:
            self._files[own] = MovedFile(self.inner.open(own), name)
        return self._files[own]

    def opened(self) -> Sequence[File]:
        proxies = {id(file.file): file for file in self._files.values()}
        return [proxies.get(id(file), file) for file in self.inner.opened()]

    def make_local(self, names: Sequence[str]) -> None:
        self.inner.make_local([self._own(name) for name in names])

    def close(self) -> None:
        self.inner.close()

    def _seen(self, name: str) -> str:
        return f"{self.folder}/{name}" if self.folder else name

    def _own(self, name: str) -> str:
        return name.removeprefix(f"{self.folder}/") if self.folder else name
