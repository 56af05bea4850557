"""The staging ring on a fake device: the same bits as on the host, bounded memory, typed faults."""

from __future__ import annotations

import importlib.util
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import loadkit
from helpers.checkpoints import write_st
from helpers.extents import reader_threads
from helpers.fake_device import FakeDevice, WatchedReader, pretend
from helpers.staged import PARAMS, expected, large, large_weights, place_large, random_tensor
from helpers.traced import Checkpoint, Tensor, check_line, each, equal
from loadkit.config import LoadConfig
from loadkit.errors import DeviceError, LoadkitError, ModelError, OptionError, ResourceError
from loadkit.execution import moves_of
from loadkit.loader import LoadResult
from loadkit.readers.base import Extent
from loadkit.staging_jobs import Load, fills, jobs_of, places_of, split
from loadkit.tracing.storage import FileLeaf

HERE = Path(__file__).parent
SLOT = 64 << 10  # the smallest there is, so that small tensors fill many


def again(name: str) -> ModuleType:
    """A test module of this folder, for the loaders that it tests."""
    spec = importlib.util.spec_from_file_location(f"again_{name}", HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


OPERATIONS = again("test_recorder_operations").CASES
NAMED = again("test_recorder").CASES


@pytest.fixture(params=[1000, 3, 0], ids=["late", "lagging", "at once"])
def layer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """The CPU is a fake accelerator that does its work as late as can be, or at once."""
    return pretend(monkeypatch, FakeDevice(lag=request.param))


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    return pretend(monkeypatch, FakeDevice())


def ring(slots: int = 4, threads: int = 2, reader: str = WatchedReader.name) -> LoadConfig:
    return LoadConfig(
        use_tqdm_on_load=False,
        reader=reader,
        num_threads=threads,
        staging_slots=slots,
        staging_slot_bytes=SLOT,
    )


# ------------------------------------------------------------ the same bits


@pytest.mark.parametrize("name", [*OPERATIONS, *NAMED])
def test_every_loader_gives_on_a_device_what_it_gives_on_the_host(
    name: str, tmp_path: Path, late: FakeDevice
) -> None:
    check_line(OPERATIONS.get(name) or NAMED[name], tmp_path, WatchedReader.name)
    assert late.temporary.now == 0


def load(made: Checkpoint, config: LoadConfig, **options: Any) -> LoadResult:
    with made.registered():
        return loadkit.load(made.folder, load_config=config, **options)


def check(result: LoadResult, wanted: dict[str, Tensor]) -> None:
    state = result.model.state_dict()
    assert [name for name in wanted if not equal(state[name], wanted[name])] == []
    assert result.report.bytes_read == result.plan.bytes_to_read


@pytest.mark.parametrize(("slots", "threads"), [(2, 1), (3, 4), (16, 4)])
def test_slots_that_are_used_again_and_again_give_the_same_bits(
    slots: int, threads: int, tmp_path: Path, layer: FakeDevice
) -> None:
    result = load(large(tmp_path), ring(slots, threads))
    check(result, expected())
    assert layer.count["host"] <= slots
    assert layer.host.most <= slots * SLOT < sum(w.nbytes for w in large_weights().values())
    assert layer.count["launch"] > 3 * slots


def test_a_reader_for_one_thread_fills_half_of_the_ring_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layer: FakeDevice
) -> None:
    callers: set[int] = set()
    sizes: list[int] = []
    plain = WatchedReader.read

    def read(self: Any, extents: Sequence[Extent], landed: Any = None) -> int:
        callers.add(threading.get_ident())
        sizes.append(sum(e.rows * e.row_bytes for e in extents))
        return plain(self, extents, landed)

    monkeypatch.setattr(WatchedReader, "read", read)
    monkeypatch.setattr(WatchedReader, "concurrent", False)
    result = load(large(tmp_path), ring(8, 4))
    check(result, expected())
    assert callers == {threading.get_ident()}
    assert 2 * SLOT < max(sizes) <= 4 * SLOT


def test_the_host_holds_the_ring_and_the_device_the_parameters_and_little_more(
    tmp_path: Path, late: FakeDevice
) -> None:
    result = load(large(tmp_path), ring(4, 2))
    parameters = result.report.parameter_bytes
    assert late.memory.now == late.memory.most == parameters
    assert 0 < late.temporary.most <= 16 << 20  # what is computed is computed 8 MiB at a time
    assert late.host.now == 0
    assert result.plan.predicted_peak_bytes == 4 * SLOT
    del result


def test_parameters_are_allocated_at_their_turn(tmp_path: Path, late: FakeDevice) -> None:
    seen: list[int] = []
    plain = WatchedReader.read

    def read(self: Any, extents: Sequence[Extent], landed: Any = None) -> int:
        seen.append(late.memory.now)
        return plain(self, extents, landed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WatchedReader, "read", read)
        load(large(tmp_path), ring(2, 1))
    assert seen == sorted(seen)
    assert seen[0] < 0.3 * seen[-1]
    assert len(set(seen)) >= 6


def test_a_device_reads_in_file_order(tmp_path: Path, late: FakeDevice) -> None:
    starts: list[int] = []
    plain = WatchedReader.read

    def read(self: Any, extents: Sequence[Extent], landed: Any = None) -> int:
        starts.extend(extent.offset for extent in extents)
        return plain(self, extents, landed)

    once = {name: w for name, w in large_weights().items() if name not in ("gate", "up")}
    params = {name: PARAMS[name] for name in once}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WatchedReader, "read", read)
        load(Checkpoint(tmp_path, once, params, each(place_large)), ring(4, 1))
    assert starts == sorted(starts)
    assert len(starts) > 20


# ------------------------------------------------------------ tied weights, casts, live modules


def tied(folder: Path, second: Tensor) -> Checkpoint:
    w = random_tensor(500, 64)

    def tie(model: Any) -> None:
        model.q = model.p

    params = {"p": torch.zeros(500, 64)}
    place = each(lambda m, name, w: getattr(m, name).data.copy_(w))
    return Checkpoint(folder, {"p": w, "q": second}, params, place, tie)


def test_tied_weights_are_compared_on_the_device(tmp_path: Path, layer: FakeDevice) -> None:
    result = load(tied(tmp_path, random_tensor(500, 64)), ring())
    assert result.report.bytes_read == result.plan.bytes_to_read == 2 * 500 * 64 * 4


def test_tied_weights_that_differ_in_one_bit_are_refused(tmp_path: Path, layer: FakeDevice) -> None:
    other = random_tensor(500, 64)
    other.view(torch.int32)[499, 63] ^= 1
    with pytest.raises(ModelError) as caught:
        load(tied(tmp_path, other), ring())
    assert (caught.value.code, caught.value.tensor) == ("TIED_DIFFER", "p")
    del caught
    assert layer.memory.now == 0


def test_a_cast_that_overflows_on_the_device_names_its_tensor(
    tmp_path: Path, layer: FakeDevice
) -> None:
    w = random_tensor(300, 300)
    w[299, 299] = 1e6
    place = each(lambda m, name, w: m.p.data.copy_(w))
    made = Checkpoint(tmp_path, {"w": w}, {"p": torch.zeros(300, 300, dtype=torch.half)}, place)
    with pytest.raises(ModelError, match="w became infinite") as caught:
        load(made, ring(), dtype="auto")
    assert caught.value.code == "CAST_OVERFLOW"


def test_a_live_module_on_a_device_is_written_in_place(tmp_path: Path, layer: FakeDevice) -> None:
    module = nn.Linear(200, 300)
    weight, at = module.weight, module.weight.data_ptr()
    state = {"weight": random_tensor(300, 200), "bias": random_tensor(300, seed=1)}
    write_st(tmp_path / "model.safetensors", state)
    loadkit.load_into(module, tmp_path, load_config=ring())
    assert module.weight is weight
    assert weight.data_ptr() == at
    assert all(equal(module.state_dict()[name], state[name]) for name in state)
    assert layer.memory.most == 0


# ------------------------------------------------------------ faults


OOM: Callable[[], Exception] = lambda: torch.OutOfMemoryError("CUDA out of memory. Tried")  # noqa: E731
BROKEN: Callable[[], Exception] = lambda: RuntimeError("CUDA error: unspecified launch failure")  # noqa: E731


@pytest.mark.parametrize("kind", ["fail_launch", "fail_late", "fail_empty", "fail_scratch"])
@pytest.mark.parametrize("at", [1, 2, 5])
@pytest.mark.parametrize(
    ("error", "typed", "code"),
    [
        pytest.param(OOM, ResourceError, "E_MEMORY", id="memory"),
        pytest.param(BROKEN, DeviceError, "E_DEVICE", id="broken"),
    ],
)
def test_fault_43_a_device_that_fails_at_the_nth_call_is_a_typed_error(
    kind: str,
    at: int,
    error: Callable[[], Exception],
    typed: type[LoadkitError],
    code: str,
    tmp_path: Path,
    late: FakeDevice,
) -> None:
    setattr(late, kind, at)
    late.error = error
    before = threading.active_count()
    with pytest.raises(LoadkitError) as caught:
        load(large(tmp_path), ring(3, 2))
    if kind == "fail_empty":
        typed, code = ResourceError, "E_MEMORY"  # no memory of the device's, whatever it says
    assert isinstance(caught.value, typed)
    assert caught.value.code == code
    assert caught.value.__cause__ is not None
    # while the error is still held, the device has its memory back
    assert (late.memory.now, late.temporary.now, late.host.now) == (0, 0, 0)
    assert late.released == 1
    assert threading.active_count() == before
    assert not reader_threads()


def test_fault_43_a_device_that_is_too_small_says_so_and_loads_after_room_was_made(
    tmp_path: Path, late: FakeDevice
) -> None:
    late.room = 1 << 20
    made = large(tmp_path)
    with pytest.raises(ResourceError, match="no memory"):
        load(made, ring())
    late.room = 1 << 30
    check(load(made, ring()), expected())


def test_a_file_that_fails_stops_the_ring(tmp_path: Path, late: FakeDevice) -> None:
    made = large(tmp_path)
    plain = WatchedReader.read
    reads = 0

    def read(self: Any, extents: Sequence[Extent], landed: Any = None) -> int:
        nonlocal reads
        reads += 1
        if reads == 4:
            raise loadkit.ReadError("the disk is gone", errno=5)
        return plain(self, extents, landed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WatchedReader, "read", read)
        with pytest.raises(loadkit.ReadError, match="the disk is gone"):
            load(made, ring(4, 2))
    assert reads <= 6
    assert late.memory.now == late.host.now == 0
    assert not reader_threads()


def test_an_interrupt_ends_the_threads_and_gives_the_memory_back(
    tmp_path: Path, late: FakeDevice
) -> None:
    made = large(tmp_path)
    plain = WatchedReader.read
    main = threading.get_ident()

    def read(self: Any, extents: Sequence[Extent], landed: Any = None) -> int:
        time.sleep(0.02)
        if threading.get_ident() == main and late.count["launch"] > 3:
            signal.raise_signal(signal.SIGINT)
        return plain(self, extents, landed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WatchedReader, "read", read)
        start = time.perf_counter()
        with pytest.raises(KeyboardInterrupt):
            load(made, ring(4, 3))
        assert time.perf_counter() - start < 2
    assert not reader_threads()
    assert late.host.now == 0


# ------------------------------------------------------------ portions


class _File:
    name = "f"


class _Info:
    file = _File()
    offset = 0


def portions_of(loads: Sequence[Load], slot_bytes: int, slots: int) -> dict[int, bytes]:
    """What lands where, by the portions: byte of the job's memory -> byte of the file."""
    landed: dict[int, int] = {}
    job: Any = type("J", (), {"loads": list(loads)})()
    for fill in fills([job], slot_bytes, slots):
        assert len(fill) <= slots
        for slot in fill:
            used: set[int] = set()
            for _, load, at in slot:
                mine = set(range(at, at + load.nbytes))
                assert not used & mine
                assert at + load.nbytes <= slot_bytes
                used |= mine
                for row in range(load.rows):
                    for byte in range(load.row_bytes):
                        to = load.at + row * load.row_bytes + byte
                        assert to not in landed
                        landed[to] = load.offset + row * load.file_stride + byte
        assert len(places_of(fill)) == sum(len(slot) for slot in fill)
    return landed  # type: ignore[return-value]


@pytest.mark.parametrize("seed", range(60))
def test_loads_cut_into_slots_are_all_there_once(seed: int) -> None:
    rng = random.Random(seed)
    loads: list[Load] = []
    wanted: dict[int, int] = {}
    leaf: Any = FileLeaf(_Info(), "t", (1,), torch.uint8)  # type: ignore[arg-type]
    at = offset = 0
    for _ in range(rng.randint(1, 5)):
        row_bytes, rows = rng.choice([1, 7, 64, 200, 700]), rng.randint(1, 9)
        stride = row_bytes + rng.choice([0, 0, 5, 300])
        loads.append(Load(leaf, offset, row_bytes, rows, stride, at))
        for row in range(rows):
            for byte in range(row_bytes):
                wanted[at + row * row_bytes + byte] = offset + row * stride + byte
        at += row_bytes * rows
        offset += stride * rows
    assert portions_of(loads, rng.choice([64, 100, 256, 1000]), rng.randint(1, 4)) == wanted


# ------------------------------------------------------------ options


@pytest.mark.parametrize("name", ["staging_slots", "staging_slot_bytes"])
def test_an_option_of_the_ring_is_refused_where_nothing_is_staged(
    name: str, tmp_path: Path
) -> None:
    config = LoadConfig(**{name: 1 << 20 if name.endswith("bytes") else 5})
    made = large(tmp_path)
    for call in (loadkit.plan, loadkit.load):
        with made.registered(), pytest.raises(OptionError, match=f"{name}=.* no weight") as caught:
            call(tmp_path, load_config=config)
        assert caught.value.detail == {"options": [name]}
    with pytest.raises(OptionError, match=name):
        next(loadkit.iter_weights(tmp_path, load_config=config))


def test_a_plan_for_a_device_counts_what_the_ring_reads(tmp_path: Path, late: FakeDevice) -> None:
    made = large(tmp_path)
    with made.registered():
        plan = loadkit.plan(tmp_path, load_config=ring())
    assert plan.bytes_to_read > plan.bytes_needed  # columns are read with their gaps
    jobs = [
        job
        for t in plan.targets
        for job in jobs_of(t, split(moves_of(t, alias=False)).staged, SLOT)
    ]
    assert sum(load.nbytes for job in jobs for load in job.loads) == plan.bytes_to_read
    assert late.count == {}
