"""The library as the reader needs it: a range is submitted, and waited for.

One engine for each kind of memory: the host's, and each accelerator's, with GPU direct storage or
by pinned buffers of the library's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch

from loadkit.errors import ReadError
from loadkit.readers.library import library
from loadkit.readers.ranges import Range
from loadkit.text import printable

__all__ = ["BouncedEngine", "DirectEngine", "Engine", "Engines"]

NODE = "/dev/nvidia-fs0"


class Engine(Protocol):
    """Reads ranges into one kind of memory."""

    def submit(self, item: Range) -> Any:
        """Begin to read a range."""

    def wait(self, request: Any) -> bool:
        """Wait for its end; whether all of it is there."""


class Engines:
    """Makes an engine for a device when it is first wanted.

    Args:
        threads: that read, of each engine.
        bounce_kib: KiB of a thread's buffer.
        gds: accelerators are reached by GPU direct storage.

    Raises:
        NotInstalledError: the package is not installed.
        PluginError: it cannot be imported.
    """

    def __init__(self, threads: int, bounce_kib: int, *, gds: bool) -> None:
        self._native: Any = library(
            "fastsafetensors.cpp", package="fastsafetensors", extra="fastsafetensors"
        )
        self._native.set_gil_release(True)
        self._sizes = threads, bounce_kib
        self._gds = gds
        self._made: dict[torch.device, Engine] = {}

    def of(self, device: torch.device) -> Engine:
        """The engine of a device."""
        if device not in self._made:
            direct = self._gds and device.type != "cpu"
            if device.type != "cpu":
                self._load_runtime(direct)
            kind = DirectEngine if direct else BouncedEngine
            self._made[device] = kind(self._native, device, *self._sizes)
        return self._made[device]

    def close(self) -> None:
        """End all threads; may be called twice."""
        self._made.clear()

    def _load_runtime(self, direct: bool) -> None:
        """Have the library find the accelerator's runtime, and direct storage's driver."""
        name = "fastsafetensors"
        gds = library(f"{name}.copier.gds", package=name, extra=name)
        frameworks = library(f"{name}.frameworks", package=name, extra=name)
        framework = frameworks.get_framework_op("pytorch")
        gds.load_library_func(framework)
        if not direct:
            return
        if not self._native.is_hip_found() and not Path(NODE).exists():
            raise _no_gds(f"there is no {NODE}")  # the driver would close descriptor 0 over it
        if not self._native.is_cufile_found():
            raise _no_gds("libcufile is not there")
        try:
            gds.init_gds(framework)
        except Exception as error:
            raise _no_gds(str(error)) from error


class BouncedEngine:
    """``pread`` by the library's threads; to an accelerator through their pinned buffers."""

    def __init__(self, native: Any, device: torch.device, threads: int, bounce_kib: int) -> None:
        self._native = native
        self._on_device = device.type != "cpu"
        self._reader = native.nogds_file_reader(
            False, bounce_kib, threads, self._on_device, device.index or 0, -1
        )

    def submit(self, item: Range) -> Any:
        memory = self._native.gds_device_buffer(item.address, item.nbytes, self._on_device)
        return self._reader.submit_read(item.file.fileno(), memory, item.offset, item.nbytes, 0)

    def wait(self, request: Any) -> bool:
        return bool(self._reader.wait_read(request))


class DirectEngine:
    """GPU direct storage: from the disk to the accelerator. Keeps a handle of each file."""

    def __init__(self, native: Any, device: torch.device, threads: int, bounce_kib: int) -> None:
        self._native = native
        self._on_device = device.type != "cpu"
        block = bounce_kib << 10
        self._reader = native.gds_file_reader(
            threads, self._on_device, device.index or 0, block, -1
        )
        self._files: dict[int, Any] = {}

    def submit(self, item: Range) -> Any:
        file = item.file
        if id(file) not in self._files:
            try:
                self._files[id(file)] = self._native.gds_file_handle(
                    file.path, False, self._on_device
                )
            except RuntimeError as error:
                raise _no_gds(str(error), item) from error
        memory = self._native.gds_device_buffer(item.address, item.nbytes, self._on_device)
        where = item.offset, item.nbytes, 0, file.size
        return self._reader.submit_read(self._files[id(file)], memory, *where)

    def wait(self, request: Any) -> bool:
        return int(self._reader.wait_read(request)) >= 0


def _no_gds(why: str, item: Range | None = None) -> ReadError:
    where: dict[str, Any] = {}
    if item is not None:
        where = {"file": item.file.name, "tensor": item.extent.tensor, "offset": item.offset}
    return ReadError(
        f"GPU direct storage does not work here: {printable(why)}",
        hint="leave nogds=false out",
        **where,
    )
