"""The memory that storages are given while they are filled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from loadkit.device_layer import DeviceLayer
from loadkit.errors import ResourceError
from loadkit.execution import Target
from loadkit.page_runs import Pages
from loadkit.readers.pages import reserve
from loadkit.tracing.evaluate import strided
from loadkit.tracing.storage import Storage
from loadkit.tracing.view import View

__all__ = ["StorageMemory"]

_SMALL = 16 << 20  # bytes of a storage that shares a block; a larger one is many requests anyway
_BLOCK = 64 << 20
_ALIGN = 64  # as torch aligns what it allocates


class StorageMemory:
    """The memory of each storage: owned, the file's mapping, or a live module's own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.flat: dict[int, torch.Tensor] = {}
        self.layers: dict[torch.device, DeviceLayer] = {}

    def of(self, storage: Storage, dtype: torch.dtype) -> torch.Tensor:
        """Flat 1-d memory; allocated at its first use."""
        flat = self.flat.get(id(storage))
        if flat is None:
            flat = storage.real
            if flat is None:
                kind = dtype if dtype.itemsize == storage.itemsize else torch.uint8
                flat = self._new(storage.numel * storage.itemsize // kind.itemsize, kind)
            self.flat[id(storage)] = flat
        return flat

    def with_pages(self, storage: Storage, dtype: torch.dtype, pages: Pages) -> torch.Tensor:
        """As ``of``, for a storage without memory yet: it lies in its pages as these need it.

        Raises:
            ResourceError: no memory.
        """
        nbytes = storage.numel * storage.itemsize
        try:
            flat = reserve(nbytes, pages.phase, len(pages.runs))
        except (MemoryError, OSError) as error:
            raise ResourceError(f"no memory for {nbytes} bytes") from error
        return self.flat.setdefault(id(storage), flat.view(dtype))

    def side_by_side(self, targets: Iterable[Target]) -> None:
        """Give small storages that have no memory yet places one after the other, in this order.

        Each is a tensor of its own, and saved it is nothing but its own bytes; but what they lie in
        is given back when the last one of them is gone. So no more than ``_BLOCK`` bytes are one.

        Raises:
            ResourceError: no memory.
        """
        block: dict[int, tuple[int, int, torch.dtype]] = {}  # by id: first byte, bytes, dtype
        end = 0
        for target in targets:
            storage = target.storage
            nbytes = storage.numel * storage.itemsize
            placed = id(storage) in self.flat or id(storage) in block or storage.real is not None
            if placed or not 0 < nbytes <= _SMALL or self.device.type != "cpu":
                continue
            if end + nbytes > _BLOCK:
                self._lay(block, end)
                block, end = {}, 0
            kind = target.dtype if target.dtype.itemsize == storage.itemsize else torch.uint8
            block[id(storage)] = end, nbytes, kind
            end += nbytes + -nbytes % _ALIGN
        self._lay(block, end)

    def _lay(self, block: Mapping[int, tuple[int, int, torch.dtype]], nbytes: int) -> None:
        """Memory for a block of storages; one alone needs none."""
        if len(block) < 2:
            return
        memory = self._new(nbytes, torch.uint8).numpy()
        for key, (start, size, dtype) in block.items():
            self.flat[key] = torch.frombuffer(memory[start : start + size], dtype=dtype)

    def _new(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        layer = self.layers.get(self.device)
        try:
            if layer is not None:
                return layer.empty(numel, dtype)
            return torch.empty(numel, dtype=dtype, device=self.device)
        except RuntimeError as error:
            raise ResourceError(
                f"no memory for {numel * dtype.itemsize} bytes on {self.device}"
            ) from error

    def view(self, target: Target, view: View) -> torch.Tensor:
        """A region of a target's storage, as its dtype."""
        return strided(self.of(target.storage, target.dtype), view, target.dtype)
