"""The cache of one checkpoint: where it lies, how it is made once, and how it is read."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from loadkit.atomic_folder import AtomicFolder
from loadkit.errors import FormatError, OptionError, ReadError
from loadkit.file_checks import show, show_path
from loadkit.output_file import write_error
from loadkit.sources.local_file import LocalFile
from loadkit.tensor_info import TensorInfo
from loadkit.torch_archive.values import TORCH_DTYPES
from loadkit.tracing.lazies import realise
from loadkit_default.npcache.contents import (
    NAMES,
    SCHEMA,
    CachedTensor,
    file_name,
    read_names,
    spell_names,
)
from loadkit_default.npcache.npy_header import npy_header, read_npy_header

if TYPE_CHECKING:
    from loadkit.config import LoadConfig
    from loadkit.sources.base import File, Source

__all__ = ["Cache", "cache_of"]

logger = logging.getLogger(__name__)

PIECE = 1 << 30  # bytes of a numpy file, unless one tensor alone is larger
ALIGN = 64  # of a tensor in its file: a view of it suits every dtype
LOCK_TIMEOUT = 3600.0  # seconds to wait for another process that makes the cache
_UNLOCKABLE = {errno.ENOLCK, errno.ENOTSUP, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSYS}


def cache_of(source: Source, files: list[File], load_config: LoadConfig) -> Cache:
    """The cache of a checkpoint's very files; they change, and it is another one.

    Raises:
        OptionError: ``cache_dir`` lies in the checkpoint's folder.
    """
    identities = [[f.name, f.size, *(f.identity() or ("",))] for f in files]
    said = json.dumps([SCHEMA, source.uri, identities, load_config.weights_key])
    key = hashlib.sha256(said.encode()).hexdigest()
    base = Path(os.path.realpath(_base(load_config)))
    root = getattr(source, "root", None)
    if root is not None and base.is_relative_to(root):
        raise OptionError(
            f"the cache would lie in the checkpoint's own folder: {show_path(base)}",
            detail={"options": ["cache_dir"]},
            hint="give another folder as LoadConfig.cache_dir",
        )
    return Cache(base / key[:40], key)


def _base(load_config: LoadConfig) -> Path:
    if load_config.cache_dir is not None:
        return Path(load_config.cache_dir).expanduser() / "npcache"
    given = os.environ.get("LOADKIT_CACHE") or os.environ.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path.home() / ".cache") / "loadkit" / "npcache"


class Cache:
    """One checkpoint's cache.

    Args:
        folder: where it is, or will be.
        key: of the files it was made of.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self.folder = folder
        self.key = key

    @property
    def exists(self) -> bool:
        """Whether it is there; it is put there whole."""
        return (self.folder / NAMES).is_file()

    def make(self, tensors: Mapping[str, torch.Tensor], skipped: Mapping[str, str]) -> None:
        """Make it, unless another process did in the meantime. One tensor is in memory at a time.

        Raises:
            WriteError: it cannot be written; nothing of it stays.
            ReadError: E_TIMEOUT, another process holds the lock for too long.
            LoadkitError: a tensor could not be read.
        """
        with self._locked():
            if self.exists:
                return
            began = time.perf_counter()
            laid, sizes = _lay_out(self.key, tensors)
            with AtomicFolder(self.folder, lambda _: True) as folder:
                for name, nbytes in sizes.items():
                    with folder.create(name) as out:
                        out.write(npy_header(nbytes))
                        start = out.size
                        for each in laid:
                            if each.file == name:
                                out.write(bytes(start + each.offset - out.size))
                                out.write(_bytes_of(tensors[each.name]), each.name)
                        out.write(bytes(start + nbytes - out.size))
                with folder.create(NAMES) as out:
                    out.write(spell_names(self.key, laid, dict(skipped)))
            seconds = time.perf_counter() - began
            logger.info("npcache: %s made in %.1f s", show_path(self.folder), seconds)

    def read(self, source: Source) -> tuple[list[TensorInfo], dict[str, str]]:
        """The tensors in file order, and what was skipped. The source adopts the numpy files.

        Raises:
            FormatError: E_NPY, E_NAME, E_LAYOUT, E_JSON: the cache is damaged.
            ReadFailure: it cannot be read.
        """
        listed = LocalFile(NAMES, str(self.folder / NAMES))
        try:
            tensors, skipped = read_names(listed, self.key)
        finally:
            listed.close()
        opened: dict[str, tuple[File, int, int]] = {}
        infos = []
        for each in tensors:
            if each.file not in opened:
                opened[each.file] = self._open(source, each)
            file, start, nbytes = opened[each.file]
            if each.offset + each.nbytes > nbytes:
                raise FormatError(
                    f"tensor {show(each.name)} reaches to byte {each.offset + each.nbytes} of "
                    f"{nbytes} in {show(file.name)}",
                    code="E_LAYOUT",
                    file=file.name,
                    tensor=each.name,
                    offset=start + each.offset,
                    hint=f"remove {show_path(self.folder)}; the next load makes it again",
                )
            place = start + each.offset
            infos.append(TensorInfo(each.name, file, place, each.nbytes, each.shape, each.dtype))
        return sorted(infos, key=lambda info: (info.file.name, info.offset)), skipped

    def _open(self, source: Source, each: CachedTensor) -> tuple[File, int, int]:
        """A numpy file, its data's first byte, and how many bytes it has."""
        file: File | None = next((f for f in source.opened() if f.name == each.file), None)
        if file is None:
            if not os.path.lexists(self.folder / each.file):
                raise FormatError(
                    f"{show(NAMES)} names {show(each.file)}, which is not there",
                    code="E_NAME",
                    file=NAMES,
                    tensor=each.name,
                    hint=f"remove {show_path(self.folder)}; the next load makes it again",
                )
            file = LocalFile(each.file, str(self.folder / each.file))
            source.adopt(file)
        try:
            header = read_npy_header(file)
        except FormatError as error:
            error.tensor = error.tensor or each.name  # the first of those that are in it
            raise
        if header.descr != "|u1" or len(header.shape) != 1:
            raise FormatError(
                f"{show(file.name)} holds {header.descr} {list(header.shape)}, not a row of bytes",
                code="E_NPY",
                file=file.name,
                offset=0,
                hint=f"remove {show_path(self.folder)}; the next load makes it again",
            )
        return file, header.start, header.shape[0]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One process makes the cache; the others wait, and then find it."""
        path = self.folder.with_name(f".{self.folder.name}.lock")
        fd = -1
        try:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            except OSError as error:
                raise write_error(error, str(path.parent), "make a cache in") from error
            _wait(fd, path)
            yield
        finally:
            if fd >= 0:
                os.close(fd)


def _wait(fd: int, path: Path) -> None:
    """Take the lock. Where there are no locks, caches are put in place whole all the same."""
    end, told = time.monotonic() + LOCK_TIMEOUT, False
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not told:
                logger.info("waiting for another process that makes %s", show_path(path))
                told = True
            if time.monotonic() > end:
                raise ReadError(
                    f"another process has held {show_path(path)} for {LOCK_TIMEOUT:.0f} seconds",
                    code="E_TIMEOUT",
                    hint="look for a process that hangs",
                ) from None
            time.sleep(0.05)
        except OSError as error:
            if error.errno not in _UNLOCKABLE:
                raise write_error(error, str(path), "lock") from error
            logger.info("%s cannot be locked: going on without", show_path(path))
            return


def _lay_out(
    key: str, tensors: Mapping[str, torch.Tensor]
) -> tuple[list[CachedTensor], dict[str, int]]:
    """Where each tensor goes, and how many bytes each file holds."""
    laid: list[CachedTensor] = []
    sizes: dict[str, int] = {}
    file, at = file_name(key, 1), 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.dtype.itemsize
        start = at + -at % ALIGN
        if at and start + nbytes > PIECE:
            file, start = file_name(key, len(sizes) + 1), 0
        laid.append(CachedTensor(name, file, start, _named(tensor.dtype), tuple(tensor.shape)))
        at = sizes[file] = start + nbytes
    return laid, sizes


def _named(dtype: torch.dtype) -> str:
    """A dtype as headers name it."""
    return TORCH_DTYPES[str(dtype).removeprefix("torch.")]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes, row-major, read now."""
    flat = realise(tensor, None).contiguous().reshape(-1)
    numbers: Any = flat.view(torch.uint8).numpy()
    return memoryview(numbers)
