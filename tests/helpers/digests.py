"""Manifests that say the truth of a folder of one safetensors file, and files that rot."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from loadkit.manifest import MANIFEST, FileEntry, Manifest, TensorEntry, manifest_bytes
from loadkit.safetensors_format import read_header
from loadkit.sources.local_file import LocalFile

__all__ = ["NAME", "corrupt", "place_of", "sha256", "write_manifest"]

NAME = "model.safetensors"


def sha256(data: bytes) -> str:
    """A digest as manifests write it."""
    return hashlib.sha256(data).hexdigest()


def corrupt(path: Path, offset: int) -> None:
    """Turn one bit, as a disk does: nobody wrote the file."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def place_of(folder: Path, tensor: str) -> tuple[int, int]:
    """First byte and bytes of a tensor of the file."""
    file = LocalFile(NAME, str(folder / NAME))
    info = next(info for info in read_header(file).tensors if info.name == tensor)
    file.close()
    return info.offset, info.nbytes


def write_manifest(folder: Path, *, tensors: bool, size: int | None = None) -> None:
    """A manifest that says the truth, or another size."""
    file = LocalFile(NAME, str(folder / NAME))
    data = file.read(0, file.size)
    entries = {
        info.name: TensorEntry(
            info.dtype,
            info.shape,
            info.offset,
            sha256(data[info.offset : info.offset + info.nbytes]) if tensors else None,
        )
        for info in read_header(file).tensors
    }
    file.close()
    if size is not None:
        entries = {}
    entry = FileEntry(len(data) if size is None else size, sha256(data), tensors=entries)
    (folder / MANIFEST).write_bytes(manifest_bytes(Manifest("checkpoint", {NAME: entry})))
