"""What recording costs: near-linear in writes, and no memory but the rank's own."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import loadkit
from helpers.programs import Model, lazy_of
from helpers.traced import Checkpoint, Weights, codes, words
from loadkit import tables
from loadkit.base_loader import BaseModelLoader
from loadkit.build import parameters_on_meta
from loadkit.tracing.coverage import final_pieces, overlaps, unwritten
from loadkit.tracing.expressions import Src
from loadkit.tracing.lazies import view_of
from loadkit.tracing.lazy_tensor import generated
from loadkit.tracing.recorder import Recorder
from loadkit.tracing.storage import GeneratedLeaf
from loadkit.tracing.view import View

Tensor = torch.Tensor
BF16 = torch.bfloat16


def leaf(name: str, *size: int) -> Tensor:
    """A tensor that is never asked for its numbers."""

    def never(view: View) -> Tensor:
        raise AssertionError("planning read data")

    return generated(GeneratedLeaf(name, size, BF16, never))


def recorded(size: tuple[int, ...], load: Callable[[Tensor], None]) -> tuple[Recorder, Tensor]:
    with parameters_on_meta():
        model = Model([(size, BF16)])
    param: Any = model.p0
    with Recorder() as recorder, torch.no_grad():
        recorder.begin_load()
        load(param)
    return recorder, param


def experts(count: int) -> Callable[[Tensor], None]:
    """Three parts of each expert, in random order, over memory that was zeroed first."""
    order = [(e, part) for e in range(count) for part in range(3)]
    random.Random(0).shuffle(order)

    def load(param: Tensor) -> None:
        param.data.zero_()
        for expert, part in order:
            param.data[expert].narrow(0, 16 * part, 16).copy_(leaf(f"{expert}.{part}", 32, 8)[:16])

    return load


def columns(count: int) -> Callable[[Tensor], None]:
    """Gate and up side by side in each expert's rows: their spans overlap."""

    def load(param: Tensor) -> None:
        for at in random.Random(0).sample(range(2 * count), 2 * count):
            expert, half = divmod(at, 2)
            param.data[expert][:, 4 * half : 4 * half + 4].copy_(leaf(str(at), 48, 4))

    return load


def scratch_rows(count: int) -> Callable[[Tensor], None]:
    """A scratch buffer put together row by row, of which half is taken."""

    def load(param: Tensor) -> None:
        scratch = torch.empty(2 * count * 48, 8, dtype=BF16)
        for row in random.Random(0).sample(range(len(scratch) // 48), 2 * count):
            scratch[48 * row : 48 * row + 48].copy_(leaf(str(row), 48, 8))
        param.data.copy_(scratch[: count * 48].view(param.shape))

    return load


def seconds(make: Callable[[int], Callable[[Tensor], None]], count: int) -> tuple[float, int]:
    """CPU time to trace, to resolve and to check, and how many pieces came out."""
    start = time.process_time()
    recorder, param = recorded((count, 48, 8), make(count))
    storage = recorder.track(param)
    pieces = final_pieces(storage, view_of(param), BF16)
    assert not list(overlaps(storage))
    assert not unwritten(pieces)
    assert all(isinstance(expr, Src) for _, expr in pieces)
    return time.process_time() - start, len(pieces)


@pytest.mark.parametrize(("make", "parts"), [(experts, 3), (columns, 2), (scratch_rows, 1)])
def test_a_fused_parameter_costs_near_linear_time(
    make: Callable[[int], Callable[[Tensor], None]], parts: int
) -> None:
    seconds(make, 16)  # caches
    few, _ = seconds(make, 64)
    many, pieces = seconds(make, 512)
    assert pieces == 512 * parts
    assert many < 8 * few * 4 + 0.5  # 8 times as many; quadratic would be 64 times
    assert many < 5


def test_rows_taken_by_index_cost_near_linear_time() -> None:
    order = torch.randperm(4096, generator=torch.Generator().manual_seed(0))

    def load(param: Tensor) -> None:
        param.data.copy_(leaf("w", 4096, 8)[order][:2048])

    start = time.process_time()
    recorder, param = recorded((2048, 8), load)
    pieces = final_pieces(recorder.track(param), view_of(param), BF16)
    assert time.process_time() - start < 5
    assert sum(view.numel for view, _ in pieces) == 2048 * 8
    assert all(isinstance(expr, Src) for _, expr in pieces)


# ------------------------------------------------------------ loaders that yield real data


class Staging(BaseModelLoader):
    """Yields real tensors, all through one buffer that it uses again."""

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        def weights() -> Iterator[tuple[str, Tensor]]:
            buffer = torch.empty(64)
            for name in ("a", "b", "c"):
                out = buffer[:24].view(6, 4)
                out.copy_(torch.full((6, 4), float(ord(name))))
                yield name, out
            buffer.fill_(-1)

        model.load_weights(weights())  # type: ignore[operator]


def test_real_tensors_may_come_through_one_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(model: Any, weights: Weights) -> None:
        for name, tensor in weights:
            getattr(model, name).data.copy_(tensor[:3] * 2 if name == "b" else tensor[:3])

    like = {name: torch.zeros(3, 4) for name in "abc"}
    made = Checkpoint(tmp_path, {"a": torch.zeros(6, 4)}, like, load)
    tables.loaders.register("staging", Staging)
    with made.registered():
        result = loadkit.load(tmp_path, load_format="staging")
    values = {name: float(p[0, 0]) for name, p in result.model.named_parameters()}
    assert values == {"a": 97.0, "b": 196.0, "c": 99.0}
    assert words(result.plan) == dict.fromkeys("abc", "opaque")
    assert "OPAQUE_LOADER" in [note.code for note in result.plan.notes]
    assert made.architecture == result.plan.architecture


def test_a_half_that_is_opaque_is_held_and_counted_as_that_half(tmp_path: Path) -> None:
    big = torch.randn(256, 1024)

    def load(model: Any, weights: Weights) -> None:
        for _, tensor in weights:
            tensor.numpy()
            model.p.data.copy_(tensor[:128])

    plan = Checkpoint(tmp_path, {"w": big}, {"p": big[:128]}, load).plan()
    assert not codes(plan)
    assert plan.predicted_peak_bytes < big.nbytes * 1.2
    assert plan.bytes_needed == big.nbytes  # an opaque tensor comes whole


def test_a_shared_result_is_computed_once_and_then_let_go(tmp_path: Path) -> None:
    calls: list[int] = []

    @torch.library.custom_op("loadkit_test::counted", mutates_args=())
    def counted(x: Tensor) -> Tensor:
        calls.append(1)
        return x * 2

    @counted.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def load(model: Any, weights: Weights) -> None:
        for _, tensor in weights:
            double = counted(tensor)
            model.p.data.copy_(double[:3])
            model.q.data.copy_(double[3:])

    w = torch.randn(6, 4)
    made = Checkpoint(tmp_path, {"w": w}, {"p": w[:3], "q": w[3:]}, load)
    result = made.load()
    assert torch.equal(result.model.p, w[:3] * 2)  # type: ignore[arg-type]
    assert torch.equal(result.model.q, w[3:] * 2)  # type: ignore[arg-type]
    assert len(calls) == 1
    assert words(result.plan) == {"w": "whole"}
    assert result.report.bytes_read == result.plan.bytes_to_read == w.nbytes


def test_lazy_tensors_cost_no_memory(tmp_path: Path) -> None:
    huge = leaf("w", 1 << 20, 1 << 16)
    assert (huge.float() * 2 + 1).t().contiguous().numel() == 1 << 36
    assert lazy_of("x", torch.ones(2)).sum().item() == 2
