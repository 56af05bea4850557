"""Loads onto a real accelerator: the bits of the CPU, bounded memory, faults that give back.

These need a GPU; elsewhere they skip, and the ring's logic is tested on a fake device only.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import loadkit
from helpers.checkpoints import write_st
from helpers.staged import PARAMS, expected, large, random_tensor
from helpers.traced import Checkpoint, each, equal
from loadkit.config import LoadConfig
from loadkit.errors import ModelError, ResourceError
from loadkit.loader import LoadResult

pytestmark = pytest.mark.gpu

MIB = 1 << 20
RINGS = [{}, {"staging_slots": 2, "staging_slot_bytes": 64 << 10}, {"staging_slots": 3}]


@pytest.fixture(autouse=True)
def _given_back() -> Iterator[None]:
    """Every test starts with an empty device."""
    gc.collect()
    torch.cuda.empty_cache()
    yield
    gc.collect()


def load(made: Checkpoint, device: str = "cuda:0", **config: Any) -> LoadResult:
    options = LoadConfig(use_tqdm_on_load=False, **config)
    with made.registered():
        return loadkit.load(made.folder, device=device, load_config=options)


@pytest.mark.parametrize("ring", RINGS, ids=["default", "tiny slots", "few slots"])
@pytest.mark.parametrize("reader", ["auto", "pread", "mmap"])
def test_every_way_of_moving_bytes_gives_the_bits_of_the_host(
    tmp_path: Path, ring: dict[str, int], reader: str
) -> None:
    result = load(large(tmp_path), reader=reader, **ring)
    wanted = expected()
    state = result.model.state_dict()
    assert {tensor.device for tensor in state.values()} == {torch.device("cuda:0")}
    assert [name for name in wanted if not equal(state[name].cpu(), wanted[name])] == []
    assert result.report.bytes_read == result.plan.bytes_to_read


def big(folder: Path, params: torch.dtype = torch.bfloat16) -> Checkpoint:
    """256 MiB of bfloat16 in eight tensors."""
    weights = {f"w{n}": random_tensor(4096, 4096, seed=n).to(torch.bfloat16) for n in range(8)}
    likes = {name: torch.zeros(1, dtype=params).expand(4096, 4096) for name in weights}
    place = each(lambda model, name, w: getattr(model, name).data.copy_(w))
    return Checkpoint(folder, weights, likes, place)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_memory_is_the_parameters_on_the_device_and_the_ring_on_the_host(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    made = big(tmp_path, dtype)
    load(made)  # the device's own context and kernels are there now
    gc.collect()
    torch.cuda.empty_cache()
    result = load(made)
    assert result.report.parameter_bytes == 8 * 4096 * 4096 * dtype.itemsize
    assert result.report.peak["device_bytes"] <= result.report.parameter_bytes + 64 * MIB
    assert result.report.peak["host_anonymous_bytes"] <= 16 * 8 * MIB + 64 * MIB
    state = result.model.state_dict()
    for n in (0, 7):
        wanted = random_tensor(4096, 4096, seed=n).to(torch.bfloat16).to(dtype)
        assert equal(state[f"w{n}"].cpu(), wanted)


def test_a_load_on_a_stream_of_the_callers_is_ready_on_that_stream(tmp_path: Path) -> None:
    made = big(tmp_path)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model = load(made).model
        total = sum(p.float().sum() for p in model.parameters())
    stream.synchronize()
    wanted = sum(p.float().sum() for p in load(made, "cpu").model.parameters())
    assert torch.allclose(total.cpu(), torch.as_tensor(wanted), rtol=1e-3, atol=1.0)


def test_fault_43_a_device_without_room_gives_its_memory_back(tmp_path: Path) -> None:
    made = big(tmp_path)
    load(made)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(100 * MIB / total)
    try:
        with pytest.raises(ResourceError, match="no memory") as caught:
            load(made)
        assert caught.value.code == "E_MEMORY"
        assert torch.cuda.memory_allocated() == before  # while the error is still held
        assert torch.cuda.memory_reserved() <= before + 4 * MIB
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    load(made)


def test_a_cast_that_overflows_is_seen_on_the_device(tmp_path: Path) -> None:
    w = random_tensor(300, 300)
    w[299, 299] = 1e6
    place = each(lambda m, name, w: m.p.data.copy_(w))
    made = Checkpoint(tmp_path, {"w": w}, {"p": torch.zeros(300, 300, dtype=torch.half)}, place)
    with pytest.raises(ModelError, match="w became infinite"):
        load(made)


def test_a_live_module_on_the_device_is_written_in_place(tmp_path: Path) -> None:
    module = nn.Linear(200, 300, device="cuda")
    at = module.weight.data_ptr()
    state = {"weight": random_tensor(300, 200), "bias": random_tensor(300, seed=1)}
    write_st(tmp_path / "model.safetensors", state)
    loadkit.load_into(module, tmp_path)
    assert module.weight.data_ptr() == at
    assert all(equal(module.state_dict()[name].cpu(), state[name]) for name in state)


def test_the_parameters_are_those_that_the_cpu_gets(tmp_path: Path) -> None:
    made = large(tmp_path)
    host, device = load(made, "cpu").model, load(made).model
    assert list(host.state_dict()) == list(device.state_dict()) == list(PARAMS)
