"""The other side: a loaded model whose parameters others may read."""

from __future__ import annotations

import logging
import socket
import threading
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch

from loadkit.closing import Closing
from loadkit.config import LoadConfig
from loadkit.errors import OptionError, UsageError
from loadkit.origin import Origin, origin_of
from loadkit.processed_layout import processors_of, version_of
from loadkit.rank_files.by_key import state_of
from loadkit_modelexpress.address import SCHEME, parse_address, server_of
from loadkit_modelexpress.calls import Deadline, again
from loadkit_modelexpress.library import library
from loadkit_modelexpress.p2p.identity import build_identity, rank_of
from loadkit_modelexpress.p2p.transfer import accelerator_of, make_manager

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

__all__ = ["ServedReplica", "publish", "replica_tensors", "serve_replica"]

logger = logging.getLogger(__name__)


class ServedReplica(Closing):
    """A rank's parameters, registered and published. A context manager; leaving it ends that.

    The model must not change, and its parameters must not be freed, until then.

    Attributes:
        worker_id: which replica this is.
        source_id: of which model, as the server counts them.
        endpoint: ``host:port`` of its metadata.
    """

    def __init__(
        self, worker_id: str, source_id: str, endpoint: str, manager: Any, grpc_server: Any,
        heartbeat: Any, client: Any,
    ) -> None:  # fmt: skip
        self.worker_id, self.source_id, self.endpoint = worker_id, source_id, endpoint
        self._parts = (heartbeat, grpc_server, client, manager)
        self._lock = threading.Lock()
        self._closed = False

    def close(self, grace: float = 5.0) -> None:
        """Tell the server, wait ``grace`` seconds for readers, and give the memory back."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        heartbeat, grpc_server, client, manager = self._parts
        heartbeat.stop()
        try:
            grpc_server.drain_tensor_reads(grace)
        except (TimeoutError, RuntimeError) as error:  # the second: it has ended already
            logger.warning("replica %s ends while it is read: %s", self.worker_id, error)
        grpc_server.stop(0.5)
        client.close()
        if manager is not None:
            manager.shutdown()


def serve_replica(
    model: nn.Module,
    *,
    server: str | None = None,
    model_name: str | None = None,
    revision: str | None = None,
    host: str | None = None,
    nixl_port: int = 0,
    grpc_port: int = 0,
    load_config: LoadConfig | None = None,
) -> ServedReplica:
    """Let other processes read a loaded model's parameters, and say so to the server.

    Args:
        model: loaded by loadkit, complete and not quantised.
        server: ``host:port`` of the ModelExpress server; None: as a load finds it.
        model_name: the model's name; None: the source's.
        revision: its commit; None: the source's.
        host: the address under which others reach this process; None: this machine's.
        nixl_port: where the NIXL agent listens; 0: any.
        grpc_port: where the descriptors are served; 0: any.
        load_config: ``network_timeout`` and ``network_deadline`` count.

    Raises:
        UsageError: the model is none that can be served, or the device none.
        NotInstalledError: modelexpress or NIXL is missing.
        DeviceError: NIXL refuses.
        DownloadError: the server, or the way to it, failed.
    """
    origin = _origin(model)
    tensors = replica_tensors(model)
    (device,) = {tensor.device for tensor in tensors.values()}
    manager = make_manager("source", device, nixl_port)
    try:
        manager.register_tensors(tensors)
        return publish(
            tensors, origin, manager, server=server, model_name=model_name, revision=revision,
            host=host, grpc_port=grpc_port, load_config=load_config or LoadConfig(),
        )  # fmt: skip
    except BaseException:
        manager.shutdown()
        raise


def _origin(model: nn.Module) -> Origin:
    origin = origin_of(model)
    if origin is None or not origin.is_loaded:
        raise UsageError("the model was not loaded by loadkit", hint="load it with loadkit.load")
    return origin


def replica_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a replica serves: every parameter and buffer that a load wrote, each memory once.

    Raises:
        UsageError: one has a layout that its bytes do not tell, or they lie on several devices.
    """
    for name, module in model.named_modules():
        if any(version_of(processor) != 0 for processor in processors_of(module)):
            raise UsageError(
                f"module {name!r} was post-processed, and descriptors do not tell the shapes that "
                "makes",
                parameter=name,
                hint="serve a model that is not quantised",
            )
    state = state_of(model)
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name in _origin(model).sizes:
        tensor = state[name].detach()
        if not tensor.numel() or tensor.data_ptr() in seen:
            continue
        if not tensor.is_contiguous():
            raise UsageError(f"parameter {name!r} is not contiguous", parameter=name)
        seen.add(tensor.data_ptr())
        found[name] = tensor
    devices = {str(tensor.device) for tensor in found.values()}
    if len(devices) != 1:
        raise UsageError(
            f"a replica's parameters lie on one device; these are on {', '.join(sorted(devices))}"
        )
    return found


def publish(
    tensors: Mapping[str, torch.Tensor],
    origin: Origin,
    manager: Any,
    *,
    server: str | None,
    model_name: str | None,
    revision: str | None,
    host: str | None,
    grpc_port: int,
    load_config: LoadConfig,
) -> ServedReplica:
    """Serve descriptors of registered tensors by the package's classes, and tell the server.

    Args:
        tensors: as of ``replica_tensors``.
        origin: of their model.
        manager: the NIXL manager that they are registered with.
        server, model_name, revision, host, grpc_port, load_config: as of ``serve_replica``.

    Raises:
        OptionError: the model's name is not known.
        DownloadError: the server, or the way to it, failed.
    """
    messages, package = library("p2p_pb2"), library("metadata.worker_server")
    config = origin.config
    name, commit, named = _named(origin, model_name, revision)
    address = server_of(server, "" if server else named)
    identity = build_identity(
        name, commit, config.parallel_config, config.model_config.dtype_name,
        ",".join(config.model_config.architectures),
    )  # fmt: skip
    rank, worker_id = rank_of(config.parallel_config), uuid4().hex
    device = next(iter(tensors.values())).device
    descriptors = library("metadata.publish").build_tensor_protos(
        dict(tensors), device.index or 0, rank
    )
    shown = host or _own_address()
    served = {
        "metadata_endpoint": f"{shown}:{manager.listen_port}", "agent_name": manager.agent_name,
        "worker_rank": rank, "accelerator": accelerator_of(device).name,
    }  # fmt: skip
    grpc_server = package.WorkerGrpcServer(
        descriptors, None, port=grpc_port, worker_id=worker_id, **served
    )
    endpoint = f"{shown}:{grpc_server.start()}"
    worker = messages.WorkerMetadata(worker_grpc_endpoint=endpoint, **served)
    client = library("client").MxClient(server_url=address)
    heartbeat: Any = None

    def publish_again() -> str:
        return str(client.publish_metadata(identity, worker, worker_id))

    try:
        deadline = Deadline(load_config, "publishing this replica")
        source_id = again(publish_again, deadline, address, name)
        grpc_server.set_mx_source_id(source_id)
        heartbeat = library("metadata.publisher").PublisherThread(
            client, mx_source_id=source_id, worker_id=worker_id, worker_rank=rank,
            nixl_manager=manager, publish_fn=publish_again,
        )  # fmt: skip
        again(
            lambda: client.update_status(
                source_id, worker_id, rank, messages.SOURCE_STATUS_READY
            ),
            deadline, address, name,
        )  # fmt: skip
        heartbeat.start()
    except BaseException:
        grpc_server.stop(0)
        client.close()
        raise
    logger.info("replica %s of %s, rank %d, at %s", worker_id, name, rank, endpoint)
    return ServedReplica(worker_id, source_id, endpoint, manager, grpc_server, heartbeat, client)


def _named(origin: Origin, name: str | None, revision: str | None) -> tuple[str, str, str]:
    """The model's name and commit, and the server that its source is on."""
    source = origin.config.model_config.source
    server = ""
    if source.startswith((SCHEME, "hf://")):
        address = parse_address(source)
        name, revision = name or address.model, revision or address.revision
        server = address.server
    if not name:
        raise OptionError(
            "a replica is found by its model's name, and a path says none",
            detail={"option": "model_name"},
            hint="name it: model_name='org/name'",
        )
    return name, revision or "", server


def _own_address() -> str:
    """This machine's address towards others; no packet is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostbyname(socket.gethostname())
