"""The reader ``fastsafetensors``: ranges of files into memory, by that library's native readers.

The library's own loaders bring whole files, or whole tensors, into a buffer. What they are made of
takes any range and any address: a rank reads its parts, straight into its parameters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from loadkit.errors import OptionError
from loadkit.options import OptionSpec
from loadkit.readers.library import LibraryReader
from loadkit.readers.ranges import Range, refused
from loadkit_fastsafetensors.engines import Engine, Engines
from loadkit_fastsafetensors.options import OPTIONS

if TYPE_CHECKING:
    from loadkit.config import LoadConfig

__all__ = ["FastSafetensorsReader"]

THREADS = 16
BOUNCE_KIB = 16 << 10
AHEAD = 4  # ranges under way for each thread


class FastSafetensorsReader(LibraryReader):
    """Keeps the library's threads from its first read until ``close``.

    Raises:
        NotInstalledError: the package is not installed.
        OptionError: GPU direct storage was asked for, and there is no accelerator.
    """

    name: ClassVar[str] = "fastsafetensors"
    options: ClassVar[Mapping[str, OptionSpec]] = OPTIONS

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        chosen = self.options_of(load_config)
        self._threads = chosen["max_threads"] or load_config.num_threads or THREADS
        bounce = chosen["bbuf_size_kb"] or BOUNCE_KIB
        gds = chosen["nogds"] is False
        self.onto_device = torch.cuda.is_available()
        if gds and not self.onto_device:
            raise OptionError(
                "nogds=false is GPU direct storage, which needs CUDA: torch.cuda.is_available() "
                "is False",
                detail={"options": ["nogds"]},
                hint="leave nogds out",
            )
        self._bounce_bytes = self._threads * (bounce << 10) if self.onto_device else 0
        self._engines = Engines(self._threads, bounce, gds=gds)

    def buffer_bytes(self) -> int:
        """The buffer of rows with gaps; with an accelerator the threads' pinned memory too."""
        return super().buffer_bytes() + self._bounce_bytes

    def fetch(self, wanted: Sequence[Range], landed: Callable[[int], None]) -> None:
        """A few ranges for each thread are under way; after an error those are waited for."""
        under_way: deque[tuple[Range, Engine, Any]] = deque()
        try:
            for item in wanted:
                if len(under_way) >= AHEAD * self._threads:
                    self._settle(under_way, landed)
                engine = self._engines.of(_device(item))
                under_way.append((item, engine, engine.submit(item)))
            while under_way:
                self._settle(under_way, landed)
        finally:
            while under_way:
                _, engine, request = under_way.popleft()
                engine.wait(request)

    def _settle(
        self, under_way: deque[tuple[Range, Engine, Any]], landed: Callable[[int], None]
    ) -> None:
        """Wait for the oldest."""
        item, engine, request = under_way.popleft()
        if not engine.wait(request):
            raise refused(item, "fastsafetensors", "the read failed, or the file ended early")
        landed(item.nbytes)

    def close(self) -> None:
        """End the library's threads and let the buffer go."""
        self._engines.close()
        super().close()


def _device(item: Range) -> torch.device:
    """Whose memory a range goes to: spans go to a buffer of the host first."""
    return torch.device("cpu") if item.rows > 1 else item.extent.dest.device
