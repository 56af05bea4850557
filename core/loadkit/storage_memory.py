"""The memory that storages are given while they are filled."""

from __future__ import annotations

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
