"""Finding a replica: the package's client, selectors and leases, with every refusal kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from loadkit.errors import DownloadError, OptionError
from loadkit.text import printable
from loadkit_modelexpress.calls import Deadline, again, typed
from loadkit_modelexpress.library import library
from loadkit_modelexpress.p2p.descriptors import Described, described

if TYPE_CHECKING:
    from loadkit.config import LoadConfig

__all__ = ["MOST", "Replica", "Wanted", "find_replica"]

MOST = 3  # replicas that are tried, as the package does


@dataclass(frozen=True)
class Wanted:
    """What a rank looks for.

    Attributes:
        server: ``host:port`` of the metadata server.
        identity: the ``SourceIdentity``.
        rank: which part of the model.
        accelerator: ``cuda`` or ``cpu``, where it is to go.
        selector: how candidates are ranked; None: as ``MX_P2P_SOURCE_SELECTOR`` says.
    """

    server: str
    identity: Any
    rank: int
    accelerator: str
    selector: str | None = None


@dataclass(frozen=True)
class Replica:
    """A replica that lets itself be read until ``close``.

    Attributes:
        worker_id: which.
        source_id: of which model.
        grpc_endpoint: ``host:port`` of its metadata.
        agent: name of its NIXL agent.
        agent_endpoint: ``host:port`` of that.
        accelerator: where its memory is.
        tensors: what lies there.
        remarks: why others were left.
    """

    worker_id: str
    source_id: str
    grpc_endpoint: str
    agent: str
    agent_endpoint: str
    accelerator: str
    tensors: tuple[Described, ...]
    lease: Any = field(repr=False)
    remarks: tuple[str, ...] = ()

    def close(self) -> None:
        """Give the lease back; a replica that is gone has none."""
        import grpc

        try:
            self.lease.close()
        except grpc.RpcError:
            pass


def find_replica(wanted: Wanted, load_config: LoadConfig) -> Replica:
    """A replica that holds what a rank needs, and a lease on it.

    Raises:
        OptionError: no such selector.
        DownloadError: there is none, or all that were tried refused; says why each.
        LoadkitError: the server, as of ``typed``.
    """
    deadline = Deadline(load_config, "the list of replicas")
    client = library("client").MxClient(server_url=wanted.server)
    try:
        listed = again(
            lambda: (
                client.list_sources(
                    wanted.identity, library("p2p_pb2").SOURCE_STATUS_READY
                ).instances
            ),
            deadline,
            wanted.server,
            wanted.identity.model_name,
        )
        left: list[str] = []
        for one in _ranked(listed, wanted, left)[:MOST]:
            found = _try(client, one, wanted, load_config, left)
            if found is not None:
                return found
    finally:
        client.close()
    detail = {"server": wanted.server, "rank": wanted.rank, "listed": len(listed), "left": left}
    told = "; ".join(left[:10]) or (
        f"the server lists {len(listed)} of other ranks" if listed else "the server lists none"
    )
    raise DownloadError(
        f"no replica of {printable(wanted.identity.model_name, 100)} for rank {wanted.rank}: "
        f"{told}",
        detail=detail,
        hint="a replica has the same model, commit, topology and dtype, and serves with "
        "loadkit_modelexpress.serve_replica",
    )


def _ranked(listed: Any, wanted: Wanted, left: list[str]) -> list[Any]:
    """Candidates for this rank, best first, by the package's own selectors."""
    selection = library("source_selection")
    if wanted.selector is not None and wanted.selector not in selection.SELECTORS:
        raise OptionError(
            f"there is no selector {wanted.selector!r}; accepted: "
            f"{', '.join(sorted(selection.SELECTORS))}",
            detail={"option": "selector", "accepted": sorted(selection.SELECTORS)},
        )
    source_id = library("metadata.source_id").compute_mx_source_id(wanted.identity)
    fits = []
    for one in listed:
        name = f"replica {printable(one.worker_id, 60)}"
        if one.worker_rank != wanted.rank:
            continue
        if one.mx_source_id != source_id:
            left.append(f"{name} serves {printable(one.mx_source_id, 40)}, not {source_id}")
        elif not _compatible(one.accelerator, wanted, known=False):
            left.append(f"{name} is on {printable(one.accelerator, 20)}")
        else:
            fits.append(one)
    selector = (
        selection.get_configured_selector()
        if wanted.selector is None
        else selection.get_selector(wanted.selector)
    )
    ranked: list[Any] = selector.order(
        fits,
        SimpleNamespace(
            identity=wanted.identity, worker_rank=wanted.rank, worker_id=uuid4().hex[:8]
        ),
    )
    return ranked


def _compatible(accelerator: str, wanted: Wanted, *, known: bool) -> bool:
    return bool(
        library("metadata.payload").accelerators_compatible(
            wanted.accelerator,
            accelerator,
            mx_source_type=wanted.identity.mx_source_type,
            quantization=wanted.identity.quantization,
            dtype=wanted.identity.dtype,
            defer_unknown=not known,
        )
    )


def _try(
    client: Any, one: Any, wanted: Wanted, load_config: LoadConfig, left: list[str]
) -> Replica | None:
    """One candidate's metadata and a lease on it; None, and why in ``left``."""
    import grpc

    name = f"replica {printable(one.worker_id, 60)}"
    try:
        answer = client.get_metadata(one.mx_source_id, one.worker_id)
        worker = answer.worker
        if not answer.found or not worker.worker_grpc_endpoint:
            left.append(
                f"{name} has no metadata" if not answer.found else f"{name} has no endpoint"
            )
            return None
        if worker.worker_rank != wanted.rank or not _compatible(
            worker.accelerator, wanted, known=True
        ):
            left.append(
                f"{name} is rank {worker.worker_rank} on {printable(worker.accelerator, 20)}"
            )
            return None
        lease, _ = library("metadata.worker_server").prepare_tensor_read(
            worker.worker_grpc_endpoint,
            one.mx_source_id,
            worker_id=one.worker_id,
            timeout=load_config.network_timeout,
        )
    except grpc.RpcError as error:
        deadline = Deadline(load_config, name)
        left.append(typed(error, deadline, wanted.server).message)
        return None
    except RuntimeError as error:  # the package's: it is another replica than it was
        left.append(f"{name}: {printable(error, 200)}")
        return None
    try:
        tensors = described(lease.manifest, name)
    except DownloadError as error:
        lease.close()
        left.append(error.message)
        return None
    manifest = lease.manifest
    return Replica(
        one.worker_id, one.mx_source_id, worker.worker_grpc_endpoint, manifest.agent_name,
        manifest.metadata_endpoint, worker.accelerator, tensors, lease, tuple(left),
    )  # fmt: skip
