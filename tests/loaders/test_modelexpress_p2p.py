"""Replicas without NIXL: metadata and leases by the package's classes, and its calls by signature.

The transfer is a stand-in whose calls have the installed package's signatures and which copies
memory of this process; ``test_modelexpress_nixl.py`` moves it by NIXL itself.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from modelexpress import p2p_pb2
from modelexpress.accelerators import CudaAcceleratorBackend
from modelexpress.client import MxClient
from modelexpress.metadata import publish as package_publish
from modelexpress.metadata import worker_server
from modelexpress.metadata.publisher import PublisherThread
from modelexpress.metadata.worker_server import WorkerGrpcServer
from modelexpress.nixl_transfer import NixlTransferManager

import loadkit
from helpers.checkpoints import write_llama
from helpers.model_express import Hub, model_express
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.errors import (
    ChangedError,
    DownloadError,
    LoadkitError,
    OptionError,
    ReadError,
    UsageError,
)
from loadkit_modelexpress import calls, serve_replica
from loadkit_modelexpress.p2p import serving, transfer
from loadkit_modelexpress.p2p.descriptors import described
from loadkit_modelexpress.p2p.transfer import HostMemory, accelerator_of

MODEL = "org/model"


class Memory:
    """Stands for ``NixlTransferManager``: reads are copies inside this process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(NixlTransferManager).bind(*args, **kwargs).arguments
        self.agent_name, self.listen_port = given["agent_name"], given["listen_port"]
        self.backend = given["accelerator_backend"]
        self.kept: dict[str, torch.Tensor] = {}
        self.fetched: list[str] = []
        self.ended = False

    def __getattr__(self, name: str) -> Any:
        real = getattr(NixlTransferManager, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            given = dict(inspect.signature(real).bind(self, *args, **kwargs).arguments)
            del given["self"]
            return getattr(self, f"on_{name}")(**given)

        return call

    def on_initialize(self) -> None:
        pass

    def on_register_tensors(self, tensors: Any, force_per_tensor: bool = False) -> bytes:
        self.kept = dict(tensors)
        return b"metadata"

    def on_fetch_remote_and_wait(
        self, remote_agent_name: str, ip: str, port: int, timeout_seconds: float
    ) -> None:
        self.fetched.append(f"{remote_agent_name}@{ip}:{port}")

    def on_execute_read_batch(
        self, remote_agent_name: str, ranges: list[Any], timeout_seconds: float
    ) -> tuple[int, int, float]:
        for remote, local, nbytes, _ in ranges:
            ctypes.memmove(local, remote, nbytes)
        return sum(one[2] for one in ranges), len(ranges), 0.1

    def on_is_healthy(self) -> bool:
        return True

    def on_shutdown(self) -> None:
        self.ended = True


@pytest.fixture
def managers(monkeypatch: pytest.MonkeyPatch) -> list[Memory]:
    made: list[Memory] = []

    def make(*args: Any, **kwargs: Any) -> Memory:
        made.append(Memory(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr("modelexpress.nixl_transfer.NixlTransferManager", make)
    monkeypatch.setattr("modelexpress.nixl_transfer.is_nixl_available", lambda: True)
    monkeypatch.setattr(calls, "FIRST_WAIT", 0.002)
    return made


@pytest.fixture
def hub() -> Iterator[Hub]:
    with model_express() as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_llama(tmp_path / "model", torch_dtype="float32")
    return tmp_path / "model"


def config(hub: Hub, **options: Any) -> LoadConfig:
    given = {"server": hub.address, "strategies": ["p2p"], "model_name": MODEL, **options}
    return LoadConfig(
        load_format="modelexpress", model_loader_extra_config=given, network_timeout=2.0,
        use_tqdm_on_load=False,
    )  # fmt: skip


@contextmanager
def replica(hub: Hub, folder: Path, tp: int = 1, rank: int = 0, **options: Any) -> Iterator[Any]:
    parallel = ParallelConfig(tp_size=tp, tp_rank=rank)
    model = loadkit.load_model(folder, parallel=parallel)
    given = {"server": hub.address, "model_name": MODEL, "host": "127.0.0.1", **options}
    with serve_replica(model, **given) as served:
        served.model = model
        yield served


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    expected = dict(other.named_parameters())
    found = dict(one.named_parameters())
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in found
    )


# -- loads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_a_rank_takes_the_parameters_of_the_same_rank(
    hub: Hub, folder: Path, managers: list[Memory], tp: int, rank: int
) -> None:
    parallel = ParallelConfig(tp_size=tp, tp_rank=rank)
    with replica(hub, folder, tp, 1 - rank if tp > 1 else 0), replica(hub, folder, tp, rank) as one:
        plan = loadkit.plan(folder, parallel=parallel, load_config=config(hub))
        assert plan.ok
        assert {row.exact for row in plan.rows if row.parameter} == {"exact"}
        found = loadkit.load(folder, parallel=parallel, load_config=config(hub))
        assert same(found.model, one.model)
        assert all(
            mine.data_ptr() != theirs.data_ptr()
            for mine, theirs in zip(found.model.parameters(), one.model.parameters(), strict=True)
        )
    report = found.report
    assert report.reader == "nixl"
    assert report.bytes_read == plan.bytes_to_read == report.parameter_bytes
    assert report.warnings == []
    assert all(manager.ended for manager in managers)


def test_tied_weights_are_served_once(hub: Hub, tmp_path: Path, managers: list[Memory]) -> None:
    write_llama(tmp_path, head=False, tie_word_embeddings=True, torch_dtype="float32")
    with replica(hub, tmp_path) as one:
        found = loadkit.load_model(tmp_path, load_config=config(hub))
        assert same(found, one.model)
    assert sum("embed" in name or "lm_head" in name for name in managers[0].kept) == 1


def test_a_buffer_smaller_than_a_tensor_is_enough(
    hub: Hub, tmp_path: Path, managers: list[Memory]
) -> None:
    write_llama(tmp_path, hidden=128, ffn=512, vocab=512, torch_dtype="float32")
    with replica(hub, tmp_path) as one:
        found = loadkit.load(tmp_path, load_config=config(hub, transfer_buffer=1 << 16))
        assert same(found.model, one.model)
    assert found.report.requests == -(-found.report.bytes_read // (1 << 16)) > 10


def test_config_and_fallback_come_from_the_server(
    hub: Hub, folder: Path, tmp_path: Path, managers: list[Memory]
) -> None:
    hub.models[MODEL] = folder
    chain = LoadConfig(
        load_format="modelexpress", cache_dir=str(tmp_path / "cache"), network_timeout=2.0,
        model_loader_extra_config={"server": hub.address, "strategies": ["p2p", "server"]},
    )  # fmt: skip
    left = loadkit.load(MODEL, load_config=chain)
    assert left.report.reader != "nixl"
    assert any("p2p was left: no replica" in one for one in left.report.warnings)
    hub.streamed.clear()
    with serve_replica(left.model, server=hub.address, host="127.0.0.1"):
        found = loadkit.load(MODEL, load_config=chain)
    assert found.report.reader == "nixl"
    assert same(found.model, left.model)
    assert found.report.warnings == []
    assert hub.streamed == {}


# -- which replica --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [{"revision": "abc"}, {"model_name": "org/other"}],
    ids=["another commit", "another model"],
)
def test_a_replica_of_something_else_is_not_found(
    hub: Hub, folder: Path, managers: list[Memory], changes: dict[str, Any]
) -> None:
    with replica(hub, folder, **changes), pytest.raises(DownloadError, match="lists none"):
        loadkit.load(folder, load_config=config(hub))


def test_a_replica_of_another_rank_or_dtype_is_not_found(
    hub: Hub, folder: Path, managers: list[Memory]
) -> None:
    with replica(hub, folder, 2, 0):
        with pytest.raises(DownloadError, match="1 of other ranks"):
            loadkit.load(
                folder, parallel=ParallelConfig(tp_size=2, tp_rank=1), load_config=config(hub)
            )
        with pytest.raises(DownloadError, match="lists none"):
            loadkit.load(folder, load_config=config(hub))
        with pytest.raises(DownloadError, match="lists none"):
            loadkit.load(
                folder, dtype="bfloat16", parallel=ParallelConfig(tp_size=2),
                load_config=config(hub),
            )  # fmt: skip


def test_a_replica_that_is_gone_is_passed_over_and_told(
    hub: Hub, folder: Path, managers: list[Memory]
) -> None:
    with replica(hub, folder) as dead, replica(hub, folder) as one:
        for (_, worker_id), found in hub.workers.items():
            if worker_id == dead.worker_id:
                found[1].worker_grpc_endpoint = "127.0.0.1:1"
        seen = set()
        for _ in range(12):  # the selector shuffles
            done = loadkit.load(folder, load_config=config(hub))
            assert same(done.model, one.model)
            seen |= set(done.report.warnings)
    assert any(dead.worker_id in one and one.startswith("p2p: ") for one in seen)


@pytest.mark.parametrize("name", ["random", "rendezvous_hash", "load_aware", "topology_aware"])
def test_every_selector_of_the_package_can_be_named(
    hub: Hub, folder: Path, managers: list[Memory], name: str
) -> None:
    with replica(hub, folder):
        assert loadkit.plan(folder, load_config=config(hub, selector=name)).ok


def test_a_selector_that_is_not_there_is_refused(
    hub: Hub, folder: Path, managers: list[Memory]
) -> None:
    with replica(hub, folder), pytest.raises(OptionError, match="rendezvous_hash"):
        loadkit.plan(folder, load_config=config(hub, selector="nearest"))


def spoil(hub: Hub, change: Callable[[Any], Any]) -> None:
    for found in hub.workers.values():
        change(found[1])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda worker: worker.ClearField("worker_grpc_endpoint"), "no endpoint"),
        (lambda worker: setattr(worker, "accelerator", "cuda"), "is on cuda"),
        (lambda worker: setattr(worker, "worker_rank", 5), "1 of other ranks"),
    ],
)
def test_metadata_that_does_not_fit(
    hub: Hub, folder: Path, managers: list[Memory], change: Callable[[Any], Any], said: str
) -> None:
    with replica(hub, folder):
        spoil(hub, change)
        with pytest.raises(DownloadError, match=said):
            loadkit.load(folder, load_config=config(hub))


def test_a_list_of_another_model_is_not_believed(
    hub: Hub, folder: Path, managers: list[Memory]
) -> None:
    def listing(answer: Any) -> Any:
        for one in answer.instances:
            one.mx_source_id = "f" * 16
        return answer

    hub.listing = listing
    with replica(hub, folder), pytest.raises(DownloadError, match="serves ffff"):
        loadkit.load(folder, load_config=config(hub))


@pytest.mark.parametrize("call", ["sources", "metadata", "publish", "status"])
def test_the_metadata_server_fails_for_good(
    hub: Hub, folder: Path, managers: list[Memory], call: str
) -> None:
    if call in ("publish", "status"):
        hub.fails[call] = [grpc.StatusCode.UNAVAILABLE] * 9
        with pytest.raises(DownloadError, match="not reached"), replica(hub, folder):
            pass
        assert all(manager.ended for manager in managers)
        return
    with replica(hub, folder):
        hub.fails[call] = [grpc.StatusCode.UNAVAILABLE] * 9
        with pytest.raises(DownloadError, match="not reached"):
            loadkit.load(folder, load_config=config(hub))


# -- descriptors ----------------------------------------------------------------------------------


def manifest(**changes: Any) -> Any:
    one = {"name": "a", "addr": 4096, "size": 8, "device_id": 0, "dtype": "torch.float32"}
    return p2p_pb2.GetTensorManifestResponse(
        tensors=[p2p_pb2.TensorDescriptor(**{**one, **changes})], metadata_endpoint="h:1",
        agent_name="agent",
    )  # fmt: skip


def test_descriptors_are_laid_out_one_after_the_other() -> None:
    made = manifest()
    made.tensors.add(name="b", addr=64, size=6, dtype="torch.bfloat16", device_id=3)
    found = described(made, "it")
    assert [(one.name, one.start, one.dtype, one.device) for one in found] == [
        ("a", 0, "F32", 0), ("b", 8, "BF16", 3),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [{"addr": 0}, {"size": 0}, {"size": 7}, {"dtype": "torch.nothing"}, {"dtype": ""}],
    ids=repr,
)
def test_descriptors_that_cannot_be(changes: dict[str, Any]) -> None:
    with pytest.raises(DownloadError):
        described(manifest(**changes), "it")


def test_manifests_that_contradict_themselves() -> None:
    twice = manifest()
    twice.tensors.add().CopyFrom(twice.tensors[0])
    nowhere, empty = manifest(), manifest()
    nowhere.metadata_endpoint = "evil host"
    del empty.tensors[:]
    for made in (twice, nowhere, empty):
        with pytest.raises(DownloadError):
            described(made, "it")


# -- transfers that fail --------------------------------------------------------------------------


def failing(monkeypatch: pytest.MonkeyPatch, call: str, error: Exception) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(Memory, f"on_{call}", fail)


def test_a_read_that_fails_is_typed_and_leases_are_given_back(
    hub: Hub, folder: Path, managers: list[Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    with replica(hub, folder) as one:
        failing(monkeypatch, "execute_read_batch", TimeoutError("Transfer timed out"))
        with pytest.raises(ReadError, match="timed out") as caught:
            loadkit.load(folder, load_config=config(hub))
        assert one.worker_id in str(caught.value)
        assert caught.value.tensor in dict(one.model.named_parameters())
        leases = one._parts[1]._servicer._tensor_read_leases._leases
        assert leases == {}


def test_an_agent_that_is_not_reached(
    hub: Hub, folder: Path, managers: list[Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    with replica(hub, folder):
        failing(monkeypatch, "fetch_remote_and_wait", TimeoutError("no metadata"))
        with pytest.raises(LoadkitError, match="does not reach") as caught:
            loadkit.load(folder, load_config=config(hub))
    assert caught.value.code == "E_DEVICE"


def test_a_replica_that_changes_while_it_is_read_is_no_model(
    hub: Hub, folder: Path, managers: list[Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    with replica(hub, folder) as one:
        servicer = one._parts[1]._servicer
        real = Memory.on_execute_read_batch

        def move(self: Memory, **given: Any) -> Any:
            servicer._tensor_protos[0].addr += 64
            return real(self, **given)

        monkeypatch.setattr(Memory, "on_execute_read_batch", move)
        with pytest.raises(ChangedError, match="changed while"):
            loadkit.load(folder, load_config=config(hub))


def test_a_replica_that_ends_while_it_is_read(
    hub: Hub, folder: Path, managers: list[Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    with replica(hub, folder) as one:
        real = Memory.on_execute_read_batch

        def end(self: Memory, **given: Any) -> Any:
            one._parts[1].stop(0)
            return real(self, **given)

        monkeypatch.setattr(Memory, "on_execute_read_batch", end)
        with pytest.raises(DownloadError):
            loadkit.load(folder, load_config=config(hub))


def test_a_replica_that_closes_is_not_found_any_more(
    hub: Hub, folder: Path, managers: list[Memory]
) -> None:
    with replica(hub, folder):
        assert [found[2] for found in hub.workers.values()] == [p2p_pb2.SOURCE_STATUS_READY]
    assert [found[2] for found in hub.workers.values()] == [p2p_pb2.SOURCE_STATUS_STALE]


# -- what cannot be asked -------------------------------------------------------------------------


def test_what_a_replica_cannot_serve(
    hub: Hub, folder: Path, managers: list[Memory], tmp_path: Path
) -> None:
    for changes in ({"verify": "digest"}, {"reader": "pread"}):
        given = LoadConfig(
            **{
                "load_format": "modelexpress", "network_timeout": 2.0, **changes,
                "model_loader_extra_config": config(hub).model_loader_extra_config,
            }
        )  # fmt: skip
        with replica(hub, folder), pytest.raises(UsageError):
            loadkit.load(folder, load_config=given)
    with pytest.raises(UsageError, match="not loaded"):
        serve_replica(torch.nn.Linear(2, 2), server=hub.address, model_name=MODEL)
    unnamed = config(hub, model_name=None)
    with pytest.raises(OptionError, match="model_name"):
        loadkit.load(folder, load_config=unnamed)
    with pytest.raises(OptionError, match="model_name"):
        serve_replica(loadkit.load_model(folder), server=hub.address)
    write_llama(tmp_path / "no dtype")
    with pytest.raises((UsageError, DownloadError)):
        loadkit.load(tmp_path / "no dtype", load_config=config(hub))


def test_a_gpu_that_is_not_there_is_said_precisely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="needs CUDA") as caught:
        accelerator_of(torch.device("cuda:0"))
    assert caught.value.detail == {"needs": ["CUDA"]}
    monkeypatch.setattr("modelexpress.nixl_transfer.is_nixl_available", lambda: False)
    with pytest.raises(UsageError, match="NIXL") as caught:
        transfer.require_nixl(torch.device("cuda:0"))
    assert caught.value.detail["needs"] == ["NIXL", "CUDA"]
    with pytest.raises(UsageError, match="cuda and cpu are"):
        accelerator_of(torch.device("meta"))


# -- the package's signatures ---------------------------------------------------------------------


def test_calls_to_the_package_have_its_signatures() -> None:
    """Those that the stand-in does not check; each as ``loadkit_modelexpress`` makes it."""
    for function, args, kwargs in (
        (MxClient, (), {"server_url": "h:1"}),
        (MxClient.list_sources, (None, None, 2), {}),
        (MxClient.get_metadata, (None, "a", "b"), {}),
        (MxClient.publish_metadata, (None, None, None, "w"), {}),
        (MxClient.update_status, (None, "a", "w", 0, 2), {}),
        (package_publish.build_tensor_protos, ({}, 0, 0), {}),
        (worker_server.prepare_tensor_read, ("e", "s"), {"worker_id": "w", "timeout": 1.0}),
        (worker_server.fetch_tensor_manifest, ("e", "s"), {"worker_id": "w", "timeout": 1.0}),
        (
            WorkerGrpcServer, ([], None),
            dict.fromkeys(
                ("port", "worker_id", "metadata_endpoint", "agent_name", "worker_rank",
                 "accelerator")
            ),
        ),
        (
            PublisherThread, (None,),
            dict.fromkeys(
                ("mx_source_id", "worker_id", "worker_rank", "nixl_manager", "publish_fn")
            ),
        ),
    ):  # fmt: skip
        inspect.signature(function).bind(*args, **kwargs)


def test_the_host_has_everything_that_the_package_asks_of_an_accelerator() -> None:
    wanted = {name for name in vars(CudaAcceleratorBackend) if not name.startswith("_")}
    assert wanted <= set(dir(HostMemory()))
    assert HostMemory().nixl_mem_type == "DRAM"


def test_a_heartbeat_publishes_again_with_the_packages_thread(
    hub: Hub, folder: Path, managers: list[Memory]
) -> None:
    with replica(hub, folder) as one:
        hub.workers.clear()  # the server forgot everybody
        thread = one._parts[0]
        for _ in range(6):
            thread._tick()
        assert [worker for _, worker in hub.workers] == [one.worker_id]
    assert serving.ServedReplica.__doc__
