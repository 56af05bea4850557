"""Files that lie, as whole loads: one typed error, whatever reads them, and nothing left behind."""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import loadkit
from helpers.bad_safetensors import ROWS, write_row
from helpers.checkpoints import llama_sd, write_cfg, write_llama
from loadkit.config import LoadConfig
from loadkit.errors import CheckpointError, LoadkitError, PlanError
from loadkit.tensor_info import torch_dtype

READERS = [
    pytest.param({"reader": "mmap"}, id="mmap"),
    pytest.param({"reader": "mmap", "alias": "never"}, id="mmap-owned"),
    pytest.param({"reader": "pread"}, id="pread"),
]
BAD = [row for row, made in ROWS.items() if made.codes]
GOOD = [row for row, made in ROWS.items() if not made.codes]


class Holder(nn.Module):
    """One parameter for each tensor of a file, in order, whatever the tensors are called."""

    def __init__(self, entries: list[dict[str, Any]]) -> None:
        super().__init__()
        self.held = nn.ParameterList(
            nn.Parameter(torch.full(e["shape"], 3, dtype=torch_dtype(e["dtype"])), False)
            for e in entries
        )

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for parameter, (_, weight) in zip(self.held, weights, strict=True):
            parameter.data.copy_(weight)


def entries_of(file: Path) -> tuple[list[dict[str, Any]], bytes]:
    """The header's tensors in file order, and the file's data."""
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    tensors = [entry for name, entry in header.items() if name != "__metadata__"]
    return sorted(tensors, key=lambda entry: entry["data_offsets"]), data[8 + size :]


def failure(call: Callable[[], object]) -> LoadkitError:
    """The typed error that a call ends in, without what its traceback holds."""
    with pytest.raises(LoadkitError) as caught:
        call()
    error = caught.value
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


def held_here() -> tuple[int, int]:
    """Open descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()  # noqa: PTH208


@pytest.mark.parametrize("options", READERS)
@pytest.mark.parametrize("row", BAD)
def test_a_file_that_lies_is_refused_by_every_reader(
    row: str, options: dict[str, str], tmp_path: Path
) -> None:
    file = write_row(row, tmp_path / "m.safetensors")
    module = nn.Linear(1, 1)
    before, there = {k: v.clone() for k, v in module.state_dict().items()}, held_here()
    began = time.process_time()
    error = failure(lambda: loadkit.load_into(module, file, load_config=LoadConfig(**options)))
    assert isinstance(error, CheckpointError) and error.code in ROWS[row].codes
    assert time.process_time() - began < 2
    left = held_here()  # fewer, where what earlier tests left was collected meanwhile
    assert left[0] <= there[0] and left[1] <= there[1]
    assert all(module.state_dict()[k].equal(v) for k, v in before.items())


@pytest.mark.parametrize("options", READERS)
@pytest.mark.parametrize("row", GOOD)
def test_a_file_that_is_only_odd_gives_its_bytes_with_every_reader(
    row: str, options: dict[str, str], tmp_path: Path
) -> None:
    file = write_row(row, tmp_path / "m.safetensors")
    entries, data = entries_of(file)
    module = Holder(entries)
    plan = loadkit.load_into(module, file, load_config=LoadConfig(**options)).plan
    for parameter, entry in zip(module.held, entries, strict=True):
        start, end = entry["data_offsets"]
        assert parameter.reshape(-1).view(torch.uint8).numpy().tobytes() == data[start:end]
    shown = json.dumps(plan.to_dict())
    assert shown.isascii() and shown.isprintable()


# -- F35: tensors that do not suit the model ------------------------------------------------------


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2, 3), 7.0))
        self.count = nn.Parameter(torch.tensor([7, 7]), requires_grad=False)
        self.register_buffer("running", torch.full((2,), 7.0))
        self.register_buffer("computed", torch.full((2,), 7.0), persistent=False)


def good() -> dict[str, torch.Tensor]:
    return {
        "weight": torch.arange(6.0).reshape(2, 3),
        "count": torch.tensor([1, 2]),
        "running": torch.tensor([1.0, 2.0]),
    }


@pytest.mark.parametrize("options", READERS)
@pytest.mark.parametrize(
    ("changes", "tensor"),
    [
        pytest.param({"weight": torch.ones(1, 3)}, "weight", id="F35-broadcastable"),
        pytest.param({"weight": torch.ones(())}, "weight", id="F35-number"),
        pytest.param({"weight": torch.ones(3, 2)}, "weight", id="F35-turned"),
        pytest.param({"weight": torch.ones(2, 3).to(torch.complex64)}, "weight", id="F35-complex"),
        pytest.param({"count": torch.tensor([1.5, 2.5])}, "count", id="F35-fractions"),
        pytest.param({"running": torch.ones(5)}, "running", id="F35-buffer-shape"),
        pytest.param({"computed": torch.ones(9)}, "computed", id="F35-computed-buffer"),
    ],
)
def test_F35_a_tensor_that_does_not_suit_is_a_problem_before_any_write(
    changes: dict[str, torch.Tensor], tensor: str, options: dict[str, str], tmp_path: Path
) -> None:
    save_file(good() | changes, tmp_path / "m.safetensors")
    module = Odd()
    with pytest.raises(PlanError) as caught:
        loadkit.load_into(module, tmp_path / "m.safetensors", load_config=LoadConfig(**options))
    assert [problem.tensor for problem in caught.value.problems] == [tensor]
    assert caught.value.problems[0].file == "m.safetensors"
    assert all(bool((value == 7).all()) for value in module.state_dict().values())


@pytest.mark.parametrize("options", READERS)
def test_F35_numbers_that_are_none_are_loaded_as_they_are(
    options: dict[str, str], tmp_path: Path
) -> None:
    odd = torch.tensor([[float("nan"), float("inf"), -0.0], [float("-inf"), 1e-45, 1.0]])
    save_file(good() | {"weight": odd}, tmp_path / "m.safetensors")
    module = Odd()
    loadkit.load_into(module, tmp_path / "m.safetensors", load_config=LoadConfig(**options))
    assert module.weight.detach().view(torch.int32).equal(odd.view(torch.int32))


# -- faults: the file changes while it is used -----------------------------------------------------


def when_planned(monkeypatch: pytest.MonkeyPatch, act: Any) -> None:
    """Do something to the file between the plan and the read."""
    from loadkit import loader

    make_plan = loader.make_plan

    def planned(*args: Any) -> Any:
        made = make_plan(*args)
        act()
        return made

    monkeypatch.setattr(loader, "make_plan", planned)


@pytest.mark.parametrize("options", READERS)
@pytest.mark.parametrize("left", ["a byte", "the header", "nothing"])
def test_fault_8_a_file_that_is_cut_after_its_header_was_read(
    left: str, options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cfg(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(llama_sd(), file)
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    size = {"a byte": file.stat().st_size - 1, "the header": header, "nothing": 0}[left]
    when_planned(monkeypatch, lambda: os.truncate(file, size))
    gc.collect()  # mappings that earlier tests left
    there = held_here()
    error = failure(lambda: loadkit.load(tmp_path, load_config=LoadConfig(**options)))
    assert error.code in ("E_CHANGED", "E_TRUNCATED")
    assert error.file == "model.safetensors"
    gc.collect()  # a mapping goes with the last view of it
    assert held_here() == there


@pytest.mark.parametrize("options", READERS)
def test_fault_8_a_file_that_is_rewritten_while_it_is_read_is_never_a_model(
    options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cfg(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(llama_sd(), file)

    def rewrite() -> None:
        data = bytearray(file.read_bytes())
        data[-4:] = b"\x01\x02\x03\x04"
        time.sleep(0.02)  # a clock's tick: the time of change is what tells
        with file.open("r+b") as opened:
            opened.write(data)

    when_planned(monkeypatch, rewrite)
    error = failure(lambda: loadkit.load(tmp_path, load_config=LoadConfig(**options)))
    assert error.code == "E_CHANGED"


@pytest.mark.parametrize(
    "options", [{"alias": "never"}, {"reader": "pread"}], ids=["never", "pread"]
)
def test_fault_9_owned_weights_do_not_follow_a_rewrite_after_the_load(
    options: dict[str, str], tmp_path: Path
) -> None:
    write_cfg(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(llama_sd(), file)
    model = loadkit.load_model(tmp_path, load_config=LoadConfig(**options))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with file.open("r+b") as opened:
        opened.write(b"\xff" * file.stat().st_size)
    os.truncate(file, 0)
    assert all(model.state_dict()[k].equal(v) for k, v in before.items())


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("call", [loadkit.plan, loadkit.load])
def test_SEC_03_code_in_a_folder_is_never_imported(
    call: Any, trusted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, ran = tmp_path / "model", tmp_path / "RAN"
    write_llama(
        folder,
        architectures=["EvilForCausalLM"],
        auto_map={
            "AutoConfig": "modeling_evil.EvilConfig",
            "AutoModelForCausalLM": "modeling_evil.EvilForCausalLM",
        },
    )
    text = f"open({str(ran)!r}, 'w').close()\nclass EvilForCausalLM: pass\n"
    for name in ("modeling_evil", "tokenization_evil", "__init__", "config", "torch", "conftest"):
        (folder / f"{name}.py").write_text(text)
    monkeypatch.chdir(folder)
    with pytest.raises(LoadkitError, match=r"EvilForCausalLM.*auto_map"):
        call(folder, trust_remote_code=trusted)
    call(folder, architecture="LlamaForCausalLM", trust_remote_code=trusted)
    assert not ran.exists()
    assert str(folder) not in sys.path and "modeling_evil" not in sys.modules
