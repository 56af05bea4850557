"""The way between two memories: the package's NIXL manager, on a device or on the host."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

import torch

from loadkit.errors import DeviceError, NotInstalledError, ReadError, UsageError
from loadkit.text import printable
from loadkit_modelexpress.library import library

if TYPE_CHECKING:
    from loadkit_modelexpress.p2p.finding import Replica

__all__ = ["Link", "LinkOptions", "Piece", "accelerator_of", "make_manager", "require_nixl"]

NIXL_INSTALL = "pip install nixl-cu12 (or nixl-cu13, as torch was built)"


class Piece(NamedTuple):
    """Bytes of a replica, and where in the link's buffer they go."""

    address: int
    into: int
    nbytes: int
    device: int


@dataclass(frozen=True)
class LinkOptions:
    """``seconds`` that one read may take, ``buffer`` bytes that are registered, ``port`` or 0."""

    seconds: float
    buffer: int
    port: int


@dataclass(frozen=True)
class HostMemory:
    """The host as the package's manager wants an accelerator: NIXL moves host memory too."""

    name: str = "cpu"
    torch_device_type: str = "cpu"
    nixl_mem_type: str = "DRAM"

    def set_device(self, device_id: int) -> None:
        """There is one."""

    def current_device(self) -> int:
        """The one."""
        return 0

    def synchronize(self, device_id: int | None = None) -> None:
        """Nothing is under way."""

    def empty_cache(self) -> None:
        """There is none."""

    def torch_device(self, device_id: int) -> torch.device:
        """The host."""
        return torch.device("cpu")

    def is_accel_tensor(self, tensor: torch.Tensor) -> bool:
        """Whether it lies here."""
        return tensor.device.type == "cpu"

    def supports_rdma_p2p(self) -> bool:
        """Over any transport of UCX."""
        return True

    def supports_pool_reg(self) -> bool:
        """No."""
        return False

    def supports_vmm(self) -> bool:
        """No."""
        return False

    def supports_gds(self) -> bool:
        """No."""
        return False


def accelerator_of(device: torch.device) -> Any:
    """The package's boundary to a kind of memory.

    Raises:
        UsageError: NIXL does not move memory of such a device, or there is no CUDA.
    """
    if device.type == "cpu":
        return HostMemory()
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UsageError(
                "a transfer between GPUs needs CUDA: torch.cuda.is_available() is False",
                detail={"needs": ["CUDA"]},
                hint="load from files: strategies=['server']",
            )
        return library("accelerators").CudaAcceleratorBackend()
    raise UsageError(
        f"memory of device {device} is not read from replicas; cuda and cpu are",
        detail={"device": str(device)},
        hint="load from files: strategies=['server']",
    )


def require_nixl(device: torch.device) -> None:
    """What a transfer needs, all that is missing told at once.

    Raises:
        NotInstalledError: NIXL is missing, whatever else is.
        UsageError: as ``accelerator_of``.
    """
    if not library("nixl_transfer").is_nixl_available():
        cuda = device.type == "cuda" and not torch.cuda.is_available()
        raise NotInstalledError(
            "a transfer from a replica needs NIXL (none of the packages nixl-cu13, nixl-cu12, nixl "
            "is installed)" + (", and CUDA: torch.cuda.is_available() is False" if cuda else ""),
            detail={"needs": ["NIXL", *(["CUDA"] if cuda else [])], "package": "nixl-cu12"},
            hint=NIXL_INSTALL,
        )
    accelerator_of(device)


def make_manager(role: str, device: torch.device, port: int) -> Any:
    """A NIXL agent of this process, listening.

    Args:
        role: a word of its name.
        device: whose memory.
        port: where its metadata is asked for; 0: any.

    Raises:
        NotInstalledError, UsageError: as ``require_nixl``.
        DeviceError: NIXL refuses.
    """
    require_nixl(device)
    try:
        manager = library("nixl_transfer").NixlTransferManager(
            agent_name=f"loadkit-{role}-{uuid4().hex[:12]}",
            device_id=device.index or 0,
            listen_port=port or _free_port(),
            accelerator_backend=accelerator_of(device),
        )
        manager.initialize()
    except Exception as error:
        raise _failed("cannot be set up", error) from error
    return manager


class Link:
    """An agent here that may read a replica's memory into a buffer of its own.

    Args:
        replica: whose memory.
        device: where the buffer lies.
        options: how large, and how long a read may take.

    Raises:
        UsageError: the replica's memory is of another kind.
        DeviceError: NIXL refuses, or the replica's agent is not reached.
    """

    def __init__(self, replica: Replica, device: torch.device, options: LinkOptions) -> None:
        backend = accelerator_of(device)
        if replica.accelerator and replica.accelerator != backend.name:
            raise UsageError(
                f"replica {printable(replica.worker_id, 60)} holds its tensors on "
                f"{printable(replica.accelerator, 20)}, and this load's go to {device}",
                detail={"replica": replica.accelerator, "device": str(device)},
                hint="load onto the same kind of device",
            )
        self.device = device
        self._replica, self._seconds = replica, options.seconds
        self.buffer = torch.empty(options.buffer, dtype=torch.uint8, device=device)
        self._manager = make_manager("target", device, options.port)
        host, _, port = replica.agent_endpoint.rpartition(":")
        try:
            self._manager.register_tensors({"loadkit": self.buffer}, force_per_tensor=True)
            self._manager.fetch_remote_and_wait(
                remote_agent_name=replica.agent,
                ip=host.strip("[]"),
                port=int(port),
                timeout_seconds=options.seconds,
            )
        except Exception as error:
            self.close()
            raise _failed(f"does not reach {replica.agent_endpoint}", error) from error

    def read(self, pieces: Sequence[Piece]) -> None:
        """Bring pieces into the buffer.

        Raises:
            ReadError: the transfer failed, or took too long.
        """
        base = self.buffer.data_ptr()
        ranges = [(one.address, base + one.into, one.nbytes, one.device) for one in pieces]
        try:
            self._manager.execute_read_batch(
                self._replica.agent, ranges, timeout_seconds=self._seconds
            )
        except Exception as error:
            raise ReadError(
                f"reading {len(pieces)} piece(s) of replica "
                f"{printable(self._replica.worker_id, 60)} failed: NIXL says: "
                f"{printable(str(error) or type(error).__name__, 200)}",
                hint="load again; strategies=['server'] reads files instead",
            ) from error

    def wait(self) -> None:
        """Until what was copied out of the buffer is there: the next read overwrites it."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        """Disconnect, and release what was registered."""
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.shutdown()


def _failed(what: str, error: Exception) -> DeviceError:
    return DeviceError(
        f"NIXL {what}: {printable(str(error) or type(error).__name__, 300)}",
        hint="its log says more (UCX_LOG_LEVEL=info); strategies=['server'] reads files instead",
    )


def _free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
