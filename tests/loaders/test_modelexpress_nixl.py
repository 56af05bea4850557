"""Parameters between two processes by NIXL: over host memory, and over GPUs where they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoints import write_llama
from helpers.model_express import model_express

PROGRAM = Path(__file__).parents[1] / "helpers" / "nixl_ranks.py"
SECONDS = 120
pytestmark = pytest.mark.slow  # two processes; test_modelexpress_p2p.py is without NIXL


def nixl_here() -> str | None:
    """Why NIXL cannot be used here; None: it can."""
    from modelexpress._nixl import load_nixl_api

    try:
        return None if load_nixl_api() is not None else "NIXL is not installed"
    except (ImportError, OSError) as error:
        return f"NIXL cannot be imported: {error}"


def program(*words: str) -> subprocess.Popen[str]:
    env = {**os.environ, "NIXL_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "error"}
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), *words], env=env, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def last_line(text: str) -> Any:
    return json.loads([line for line in text.splitlines() if line.startswith("[")][-1])


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What a process says that took three ranks' parameters from another one."""
    if (reason := nixl_here()) is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("replica")
    write_llama(folder, hidden=64, ffn=256, vocab=512, torch_dtype="float32")
    with model_express() as hub:
        serving = program("serve", hub.address, str(folder))
        try:
            assert serving.stdout is not None
            first = next((line for line in serving.stdout if line.startswith("[")), "")
            if not first:
                said = serving.communicate(timeout=SECONDS)[1]
                if "E_DEVICE" in said or "DeviceError" in said:
                    pytest.skip(f"NIXL makes no agent here: {said[-300:]}")
                raise AssertionError(said[-3000:])
            loading = program("load", hub.address, str(folder))
            out, errors = loading.communicate(timeout=SECONDS)
            assert loading.returncode == 0, errors[-3000:]
        finally:
            _, errors = serving.communicate("", timeout=SECONDS)
        assert serving.returncode == 0, errors[-3000:]
        states = {state for _, _, state in hub.workers.values()}
    assert states == {3}, "every replica says that it is stale when it ends"
    return list(last_line(out))


@pytest.mark.parametrize("number", range(3), ids=["tp 1", "tp 2 rank 0", "tp 2 rank 1"])
def test_a_rank_takes_its_parameters_from_the_memory_of_another_process(
    loaded: list[dict[str, Any]], number: int
) -> None:
    found = loaded[number]
    assert found["digests"] == found["plain"]
    assert found["reader"] == "nixl"
    assert found["exact"]
    assert found["warnings"] == []
    assert found["bytes_read"] == found["bytes_to_read"] == found["parameter_bytes"]


def test_what_is_larger_than_the_buffer_comes_in_several_transfers(
    loaded: list[dict[str, Any]],
) -> None:
    found = loaded[0]
    assert found["requests"] == -(-found["bytes_read"] // (1 << 16)) > 1


@pytest.mark.gpu
def test_a_gpu_takes_its_parameters_from_another_gpus_memory(tmp_path: Path) -> None:
    """The same over CUDA memory, in one process. It has not been run by this project."""
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA: torch.cuda.is_available() is False")
    if (reason := nixl_here()) is not None:
        pytest.skip(reason)
    import loadkit
    from loadkit.config import LoadConfig
    from loadkit_modelexpress import serve_replica

    write_llama(tmp_path, torch_dtype="float32")
    last = torch.cuda.device_count() - 1
    plain = loadkit.load_model(tmp_path, device="cuda:0")
    with model_express() as hub:
        options = {"server": hub.address, "strategies": ["p2p"], "model_name": "org/model"}
        config = LoadConfig(load_format="modelexpress", model_loader_extra_config=options)
        with serve_replica(plain, server=hub.address, model_name="org/model", host="127.0.0.1"):
            found = loadkit.load(tmp_path, device=f"cuda:{last}", load_config=config)
    assert found.report.reader == "nixl"
    expected = dict(plain.named_parameters())
    for name, param in found.model.named_parameters():
        assert torch.equal(param.cpu(), expected[name].cpu()), name
