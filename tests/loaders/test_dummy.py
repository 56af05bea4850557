"""The dummy loader: small reproducible numbers, the same on every topology."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

import loadkit
from helpers.checkpoints import write_cfg
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.errors import OptionError
from loadkit.tracing.view import View, contiguous
from loadkit_dummy.numbers import CHUNK, LIMIT, numbers

DTYPES = [
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu",
    "float4_e2m1fn_x2", "int8", "int16", "int32", "int64", "uint8", "uint16", "bool", "complex64",
]  # fmt: skip


@pytest.mark.parametrize("name", DTYPES)
def test_MEM_06_every_dtype_is_small_finite_and_the_same_in_every_view(name: str) -> None:
    dtype = getattr(torch, name)
    whole = numbers(contiguous((64, 50), dtype.itemsize), seed=0, name="w", dtype=dtype)
    part = numbers(View((20, 7), (50, 2), 503, dtype.itemsize), seed=0, name="w", dtype=dtype)
    rows = torch.arange(20).view(-1, 1) * 50 + torch.arange(7) * 2 + 503
    same = whole.reshape(-1).view(torch.uint8).view(3200, -1)[rows.reshape(-1)]
    assert same.reshape(-1).equal(part.reshape(-1).view(torch.uint8))
    if dtype.is_floating_point and name != "float4_e2m1fn_x2":
        wide = whole.to(torch.float32)
        assert wide.isfinite().all() and wide.abs().max() <= LIMIT * 1.01
    elif dtype.is_complex:
        assert torch.view_as_real(whole).abs().max() <= LIMIT
    elif name not in ("float4_e2m1fn_x2", "bool"):
        assert set(whole.to(torch.int64).unique().tolist()) <= {-1, 0, 1}


def test_MEM_06_shapes_without_elements_or_dimensions_work() -> None:
    for size in ((), (0,), (2, 0, 3), (1,)):
        made = numbers(contiguous(size, 4), seed=0, name="w", dtype=torch.float32)
        assert tuple(made.size()) == size


def test_numbers_do_not_repeat_from_tensor_to_tensor_or_seed_to_seed() -> None:
    view = contiguous((1000,), 4)
    make = {
        (seed, name): numbers(view, seed=seed, name=name, dtype=torch.float32)
        for seed in (0, 1)
        for name in ("a", "b")
    }
    for key, value in make.items():
        assert value.unique().numel() > 990 and abs(float(value.mean())) < LIMIT / 10
        assert all(not value.equal(other) for at, other in make.items() if at != key)


def test_numbers_are_what_they_always_were() -> None:
    """splitmix64 of key and index, reckoned here with Python's integers; across pieces too."""
    size, word = CHUNK + 3, (1 << 64) - 1
    key = int.from_bytes(hashlib.blake2b(b"7:w", digest_size=8).digest(), "little")
    made = numbers(contiguous((size,), 4), seed=7, name="w", dtype=torch.float32)
    for index in (0, 1, 1000, CHUNK - 1, CHUNK, size - 1):
        x = (index * 0x9E3779B97F4A7C15 + key) & word
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & word
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & word
        x ^= x >> 31
        unit = torch.tensor(float(x >> 40)) * (2 / ((1 << 24) - 1))
        assert made[index] == (unit - 1) * LIMIT


@pytest.mark.parametrize("tp", [2, 4])
def test_MEM_06_ranks_join_to_the_whole_and_ties_stay(tmp_path: Path, tp: int) -> None:
    write_cfg(tmp_path, tie_word_embeddings=True)
    whole = dict(loadkit.load_model(tmp_path, load_format="dummy").named_parameters())
    assert "lm_head.weight" not in whole  # one parameter, listed once
    ranks = []
    for at in range(tp):
        parallel = ParallelConfig(tp_size=tp, tp_rank=at)
        model = loadkit.load_model(tmp_path, load_format="dummy", parallel=parallel)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        ranks.append(dict(model.named_parameters()))
    for name, tensor in whole.items():
        parts = [params[name] for params in ranks]
        if "o_proj" in name or "down_proj" in name:
            assert torch.cat(parts, dim=1).equal(tensor)
        elif "embed" in name:
            assert torch.cat(parts)[:40].equal(tensor[:40])
        elif "gate_up" in name:
            halves = [part.chunk(2) for part in parts]
            assert torch.cat([h[0] for h in halves] + [h[1] for h in halves]).equal(tensor)
        elif "norm" in name:
            assert all(part.equal(tensor) for part in parts)


def test_no_weight_file_is_needed_or_opened(tmp_path: Path) -> None:
    write_cfg(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    result = loadkit.load(tmp_path, load_format="dummy")
    assert result.report.bytes_read == 0
    again = loadkit.load_model(tmp_path, load_format="dummy")
    other = loadkit.load_model(
        tmp_path,
        load_format="dummy",
        load_config=LoadConfig(model_loader_extra_config={"seed": 7}),
    )
    norm = result.model.model.norm.weight
    assert norm.equal(again.model.norm.weight) and not norm.equal(other.model.norm.weight)


def test_CFG_06_unknown_options_are_refused(tmp_path: Path) -> None:
    write_cfg(tmp_path)
    wrong = LoadConfig(model_loader_extra_config={"num_threads": 4})
    with pytest.raises(OptionError, match="seed"):
        loadkit.load(tmp_path, load_format="dummy", load_config=wrong)
