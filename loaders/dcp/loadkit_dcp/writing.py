"""One tensor after another as archives of ``torch.save``, and the metadata that says where.

What reads it back is torch's own ``FileSystemReader``: items are written by ``torch.save``, and the
metadata is a pickle of torch's own classes.
"""

from __future__ import annotations

import pickle  # to write: nothing is loaded
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from loadkit.safetensors_writer import Sink

__all__ = ["ALIGNED", "Written", "metadata_bytes", "write_item"]

ALIGNED = 64  # bytes; an item begins at a multiple of it, and so does its tensor
_VERSION = "1.0.0"
_PICKLE_PROTOCOL = 4  # as Python 3.11 to 3.13 write by default


@dataclass(frozen=True, slots=True)
class Written:
    """An item that was written: ``path`` are the keys to its tensor, the name last."""

    file: str
    offset: int
    length: int
    path: tuple[str, ...]
    size: tuple[int, ...]
    dtype: torch.dtype

    @property
    def end(self) -> int:
        """The byte behind it."""
        return self.offset + self.length


class _Stream:
    """A sink as ``torch.save`` writes to one."""

    def __init__(self, out: Sink, tensor: str) -> None:
        self._out, self._tensor = out, tensor
        self.size = 0

    def write(self, data: memoryview | bytes) -> int:
        """Take all of ``data``."""
        self._out.write(data, self._tensor)
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        """Nothing: the sink is flushed by whoever opened it."""


def write_item(
    out: Sink, file: str, at: int, path: tuple[str, ...], tensor: torch.Tensor
) -> Written:
    """Write one tensor, on any device.

    Args:
        out: the open file.
        file: its name.
        at: how many bytes it has.
        path: the keys to the tensor.
        tensor: of any strides; the item's are row-major.

    Raises:
        OSError: whatever ``out`` raises.
    """
    gap = -at % ALIGNED
    if gap:
        out.write(bytes(gap))
    stream = _Stream(out, path[-1])
    torch.save(_alone(tensor), cast("IO[bytes]", stream))
    return Written(file, at + gap, stream.size, path, tuple(tensor.shape), tensor.dtype)


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor row-major, with a storage that holds nothing else: ``torch.save`` writes storages.

    A view of host memory that is in one piece gets a storage of its own over the same bytes.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if not tensor.numel() or tensor.untyped_storage().nbytes() == tensor.nbytes:
        return torch.empty(tensor.shape, dtype=tensor.dtype) if not tensor.numel() else tensor
    flat = tensor.view(-1).view(torch.uint8)
    return torch.frombuffer(flat.numpy(), dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)


def metadata_bytes(written: Sequence[Written]) -> bytes:
    """The ``.metadata`` of a folder: every tensor whole, in one box."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    entries: dict[str, Any] = {}
    planned: dict[str, tuple[str, ...]] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    for item in written:
        name = ".".join(item.path)
        start, size = torch.Size([0] * len(item.size)), torch.Size(item.size)
        entries[name] = TensorStorageMetadata(
            TensorProperties(dtype=item.dtype), size, [ChunkStorageMetadata(start, size)]
        )
        planned[name] = item.path
        index = MetadataIndex(name, start, 0)
        stored[index] = _StorageInfo(item.file, item.offset, item.length)
    made = Metadata(entries, planned, stored, StorageMeta(), _VERSION)
    return pickle.dumps(made, protocol=_PICKLE_PROTOCOL)
