"""What a load asks of an accelerator: memory, asynchronous work in order, and events.

One class over torch's own device API (``torch.accelerator``, ``torch.Stream``, ``torch.Event``)
serves every kind of device that torch knows. The CPU is no accelerator: it has no layer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from loadkit.errors import DeviceError, LoadkitError, ResourceError

__all__ = [
    "DeviceLayer",
    "Event",
    "TorchDevice",
    "device_error",
    "device_memory",
    "is_accelerator",
    "layer_of",
]

log = logging.getLogger("loadkit")


class Event(Protocol):
    """A point in a device's work."""

    def done(self) -> bool:
        """Whether the work before it is done."""

    def wait(self) -> None:
        """Block until it is; an error of that work is raised here."""


class DeviceLayer(Protocol):
    """An accelerator as the staging ring sees it.

    Work is done in the order it was launched. Any thread may call any of these.
    """

    device: torch.device

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] of host memory that the device can copy from while the host goes on."""

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Device memory for good, usable by the caller's stream and by work launched after."""

    def scratch(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] of device memory for launched work; called from inside of it."""

    def launch(self, work: Callable[[], None], source: torch.Tensor | None = None) -> None:
        """Start work; ``source`` is the host buffer that it reads, if any."""

    def record(self) -> Event:
        """The point after everything launched so far."""

    def home(self) -> Any:
        """Context in which work is done as the caller does his own; launched work comes after."""

    def finish(self) -> None:
        """Wait for everything launched; the caller's own work then comes after it."""

    def release(self) -> None:
        """Give unused memory back to the device, after a failure."""


def is_accelerator(device: torch.device) -> bool:
    """Whether memory there is reached by copies only; files land directly in the CPU's."""
    return device.type not in ("cpu", "meta")


def layer_of(device: torch.device) -> DeviceLayer:
    """The layer of an accelerator."""
    return TorchDevice(device)


class TorchDevice:
    """Any accelerator that torch knows; copies run on a side stream where it has streams."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._home = torch.accelerator.current_stream(device)
        self._side: torch.Stream | None = None
        try:
            self._side = torch.Stream(device=device)
        except (RuntimeError, NotImplementedError) as error:
            log.debug("copies to %s are not asynchronous: %s", device, error)

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """Pinned where that is possible; else plain memory, which is slower and works."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            log.warning("no pinned memory, copies to %s are slower: %s", self.device, error)
            return torch.empty(nbytes, dtype=torch.uint8)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        with self.home():
            return torch.empty(numel, dtype=dtype, device=self.device)

    def scratch(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def launch(self, work: Callable[[], None], source: torch.Tensor | None = None) -> None:
        if self._side is None:
            work()
            return
        with _current(self._side):
            work()

    def record(self) -> Event:
        if self._side is None:
            torch.accelerator.synchronize(self.device)
            return _Past()
        event = torch.Event(device=self.device)
        event.record(self._side)
        return _Recorded(event)

    @contextmanager
    def home(self) -> Iterator[None]:
        with _current(self._home):
            yield
        if self._side is not None:
            self._side.wait_stream(self._home)

    def finish(self) -> None:
        if self._side is not None:
            self._side.synchronize()
            self._home.wait_stream(self._side)

    def release(self) -> None:
        empty_cache = getattr(torch.get_device_module(self.device), "empty_cache", None)
        if empty_cache is not None:
            empty_cache()


class _Recorded:
    def __init__(self, event: torch.Event) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


class _Past:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


@contextmanager
def _current(stream: Any) -> Iterator[None]:
    """The stream is this thread's current one inside, and its device the current device."""
    if hasattr(stream, "__enter__"):
        with stream:
            yield
        return
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def device_error(error: BaseException, what: str, device: torch.device, **where: Any) -> Exception:
    """What an accelerator threw, as a typed error: E_MEMORY where it is full, else E_DEVICE."""
    if isinstance(error, LoadkitError):
        return error
    text = str(error).partition("\n")[0]
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "out of memory" in str(error):
        return ResourceError(
            f"no memory on {device} for {what}: {text}",
            hint="free memory of that device, or load a part of the model there (--tp, --pp)",
            **where,
        )
    return DeviceError(f"{what}: {device} failed: {text}", **where)


class device_memory:  # noqa: N801 - used like a function
    """Bytes that torch holds on a device: now, and at most since ``reset``. 0 where it is unknown.

    Args:
        device: as torch spells it.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        known = self._device.type not in ("cpu", "meta")
        self._module: Any = torch.get_device_module(self._device) if known else None

    def reset(self) -> None:
        """Let ``peak`` begin here."""
        self._ask("reset_peak_memory_stats")

    def now(self) -> int:
        """Bytes held."""
        return self._ask("memory_allocated") or self._ask("current_allocated_memory", plain=True)

    def peak(self) -> int:
        """Bytes held at most."""
        return self._ask("max_memory_allocated") or self.now()

    def _ask(self, name: str, *, plain: bool = False) -> int:
        ask = getattr(self._module, name, None)
        if ask is None:
            return 0
        return int((ask() if plain else ask(self._device)) or 0)
