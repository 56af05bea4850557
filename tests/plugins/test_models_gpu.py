"""Model families on an accelerator: the parameters and the tokens that the CPU gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import loadkit
from helpers.checkpoints import write_llama
from helpers.traced import equal
from loadkit.config import LoadConfig, ParallelConfig

pytestmark = pytest.mark.gpu

QUIET = LoadConfig(use_tqdm_on_load=False)
PROMPT = [1, 5, 7, 2]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_llama_on_the_device_is_the_one_on_the_host(tmp_path: Path, dtype: str) -> None:
    write_llama(tmp_path)
    host = loadkit.load_model(tmp_path, dtype=dtype, load_config=QUIET)
    device = loadkit.load_model(tmp_path, dtype=dtype, device="cuda", load_config=QUIET)
    there = device.state_dict()
    assert all(equal(value, there[name].cpu()) for name, value in host.state_dict().items())
    assert all(buffer.device.type == "cuda" for buffer in device.buffers())


def test_a_llama_on_the_device_says_what_the_one_on_the_host_says(tmp_path: Path) -> None:
    write_llama(tmp_path)
    host = loadkit.load_model(tmp_path, dtype="float32", load_config=QUIET)
    device = loadkit.load_model(tmp_path, dtype="float32", device="cuda", load_config=QUIET)
    said = loadkit.generate(device, PROMPT, max_new_tokens=16)
    assert said == loadkit.generate(host, PROMPT, max_new_tokens=16)
    positions = torch.arange(len(PROMPT))
    near = device(torch.tensor(PROMPT).cuda(), positions.cuda()).cpu()
    # the same numbers, summed in another order
    assert torch.allclose(near, host(torch.tensor(PROMPT), positions), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_two_on_the_device_is_the_one_on_the_host(tmp_path: Path, rank: int) -> None:
    write_llama(tmp_path)
    parallel = ParallelConfig(tp_size=2, tp_rank=rank)
    host = loadkit.load_model(tmp_path, parallel=parallel, load_config=QUIET)
    device = loadkit.load_model(tmp_path, parallel=parallel, device="cuda", load_config=QUIET)
    there = device.state_dict()
    assert all(equal(value, there[name].cpu()) for name, value in host.state_dict().items())
