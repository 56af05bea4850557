"""Random loader programs: what was recorded and executed equals the same code on real tensors."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import programs
from helpers.checkpoints import write_st
from helpers.programs import Env, Model, Recorded, lazy_of, run_recorded, same_bits
from loadkit.build import parameters_on_meta
from loadkit.errors import TraceError
from loadkit.execution import Target, moves_of
from loadkit.load_config import LoadConfig
from loadkit.plan_costs import Bill
from loadkit.readers.base import Reader
from loadkit.readers.mmap import MmapReader
from loadkit.readers.pread import PreadReader
from loadkit.safetensors_format import read_header
from loadkit.sources import open_source
from loadkit.tracing.expressions import Replay
from loadkit.tracing.lazy_tensor import lazy_from_info
from loadkit.tracing.program import exactness, walk

Tensor = torch.Tensor
Kind = tuple[tuple[int, ...], torch.dtype]

KINDS: list[Kind] = [
    ((4, 6), torch.float32),
    ((12,), torch.float32),
    ((6, 4), torch.bfloat16),
    ((2, 3, 4), torch.float32),
    ((8,), torch.int32),
    ((4, 4), torch.uint8),
]
SHAPES = [(4, 6), (8, 6), (24,), (6, 8), (2, 4, 6), (), (12, 2), (3, 4)]
DTYPES = [
    *(torch.float32, torch.float32, torch.bfloat16, torch.float16),
    *(torch.int8, torch.int64, torch.uint8),
]


class Case(NamedTuple):
    kinds: list[Kind]
    weights: list[Tensor]
    seeds: list[int]
    rank: int
    ranks: int


class Real(NamedTuple):
    good: list[int]
    one: Env
    other: Env


def case(seed: int, seeds: list[int], ranks: int) -> Case:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    weights = []
    for _ in range(3):
        shape, dtype = rng.choice(SHAPES), rng.choice(DTYPES)
        whole = torch.randint(-4, 5, shape, generator=generator)
        odd = torch.randn(shape, generator=generator) * 3
        weights.append((whole if rng.random() < 0.7 else odd).to(dtype))
    kinds = rng.sample(KINDS, 2)
    if rng.random() < 0.7:
        seeds = [-1, -2, -3, -4, -5, -6, *seeds]  # every parameter is written at first
    return Case(kinds, weights, seeds, rng.randrange(ranks), ranks)


def run_real(case: Case, *, plain: bool = False) -> Real:
    """Twice, over memory that agrees nowhere: where the results agree, all of it was written."""
    one, other = (
        Env(
            [programs.garbage(size, dtype, flip) for size, dtype in case.kinds],
            [w.clone() for w in case.weights],
            case.rank,
            case.ranks,
        )
        for flip in (False, True)
    )
    return Real(programs.steps(case.seeds, one, other, plain=plain), one, other)


def run_lazy(
    case: Case,
    good: list[int],
    weights: list[Tensor],
    *,
    plain: bool = False,
    reader: Reader | None = None,
) -> Recorded | None:
    """None: the program asks for numbers that nothing wrote, and the recorder said so."""
    with parameters_on_meta():
        model = Model(case.kinds)
    try:
        recorder = programs.record(good, model, weights, case.rank, case.ranks, plain=plain)
    except TraceError as error:
        assert "written" in str(error)
        return None
    return run_recorded(recorder, model, reader)


def check(real: Real, out: Recorded) -> int:
    """Every element that is said to be known is right, bit for bit; returns how many."""
    known = 0
    for a, b, value, sure in zip(
        real.one.params, real.other.params, out.values, out.known, strict=True
    ):
        assert not (sure & ~same_bits(a, b)).any(), "sure of memory that nothing wrote"
        assert same_bits(a, value)[sure].all(), "wrong"
        known += int(sure.sum())
    return known


programs_of = st.builds(
    case, st.integers(0, 10**6), st.lists(st.integers(0, 10**9), max_size=24), st.integers(1, 4)
)


@settings(max_examples=400)
@given(programs_of)
def test_a_recorded_program_equals_the_same_code_on_real_tensors(case: Case) -> None:
    real = run_real(case)
    out = run_lazy(case, real.good, [lazy_of(f"w{i}", w) for i, w in enumerate(case.weights)])
    if out is not None:
        check(real, out)


def test_recorded_programs_are_seldom_given_up() -> None:
    count = 120
    known = total = refused = 0
    for seed in range(count):
        rng = random.Random(seed)
        made = case(seed, [rng.randrange(10**9) for _ in range(20)], 1 + seed % 4)
        real = run_real(made)
        lazies = [lazy_of(f"w{i}", w) for i, w in enumerate(made.weights)]
        out = run_lazy(made, real.good, lazies)
        if out is None:
            refused += 1
            continue
        known += check(real, out)
        total += sum(sure.numel() for sure in out.known)
    assert refused < 0.15 * count
    assert known > 0.7 * total


@contextmanager
def on_disk(folder: Path, weights: list[Tensor]) -> Iterator[list[Tensor]]:
    """The weights as lazy tensors of a real file, open inside."""
    write_st(folder / "w.safetensors", {f"w{i}": w for i, w in enumerate(weights)})
    with open_source(folder, LoadConfig()) as source:
        header = read_header(source.open("w.safetensors"))
        found = {info.name: lazy_from_info(info) for info in header.tensors}
        yield [found[f"w{i}"] for i in range(len(weights))]


@pytest.mark.parametrize("reader", [PreadReader, MmapReader])
@pytest.mark.parametrize("seed", range(30))
def test_programs_over_files_equal_real_ones(
    tmp_path: Path, seed: int, reader: type[Reader]
) -> None:
    rng = random.Random(seed)
    made = case(seed, [rng.randrange(10**9) for _ in range(16)], 1 + seed % 4)
    real = run_real(made)
    with on_disk(tmp_path, made.weights) as weights, closing(reader(LoadConfig())) as opened:
        out = run_lazy(made, real.good, weights, reader=opened)
        if out is not None:
            check(real, out)


def numbered(made: Case) -> Case:
    """The same case with weights whose elements all differ, in the parameters' dtype."""
    at = 0
    weights = []
    for w in made.weights:
        weights.append(torch.arange(at, at + w.numel(), dtype=torch.int32).view(w.shape))
        at += w.numel()
    kinds = [(size, torch.int32) for size, _ in made.kinds]
    return made._replace(kinds=kinds, weights=weights)


@settings(max_examples=150)
@given(programs_of)
def test_views_and_copies_are_exact_and_know_what_they_wrote(
    case: Case,
) -> None:
    case = numbered(case)
    real = run_real(case, plain=True)
    lazies = [lazy_of(f"w{i}", w) for i, w in enumerate(case.weights)]
    out = run_lazy(case, real.good, lazies, plain=True)
    assert out is not None
    check(real, out)
    for a, b, sure, target in zip(
        real.one.params, real.other.params, out.known, out.targets, strict=True
    ):
        if not replayed(target):
            assert (sure == same_bits(a, b)).all()  # nothing that was written is thought missing
            assert {exactness(expr) for _, expr in target.pieces} <= {"exact"}


def replayed(target: Target) -> bool:
    """Whether writes overlap in a way that strides do not say (or say of other item sizes)."""
    return any(isinstance(item, Replay) for _, expr in target.pieces for item in walk(expr))


@pytest.mark.parametrize("seed", range(40))
def test_bytes_needed_are_the_bytes_of_the_elements_selected(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    made = numbered(case(seed, [rng.randrange(10**9) for _ in range(14)], 1 + seed % 4))
    total = sum(w.numel() for w in made.weights)
    real = run_real(made, plain=True)
    with on_disk(tmp_path, made.weights) as weights:
        out = run_lazy(made, real.good, weights, plain=True)
    assert out is not None
    for a, sure, target in zip(real.one.params, out.known, out.targets, strict=True):
        if replayed(target):
            continue
        numbers = [n for n in a[sure].reshape(-1).tolist() if 0 <= n < total]
        bill = Bill(PreadReader(LoadConfig()))
        bill.add(moves_of(target, alias=False))
        assert 4 * len(set(numbers)) <= bill.needed <= 4 * len(numbers)
        if len(set(numbers)) == len(numbers):
            assert bill.needed == 4 * len(numbers)


TRANSCENDENTAL = [torch.exp, torch.sigmoid, torch.tanh, torch.rsqrt, torch.nn.functional.silu]


@pytest.mark.parametrize("func", TRANSCENDENTAL)
@pytest.mark.parametrize("rank", [0, 2])
def test_transcendental_parts_are_within_two_ulp(func: object, rank: int) -> None:
    w = torch.rand(64, 33, generator=torch.Generator().manual_seed(3)) * 4 + 0.1
    with parameters_on_meta():
        model = Model([((16, 11), torch.float32)])
    with programs.Recorder() as recorder, torch.no_grad():
        recorder.begin_load()
        made = func(lazy_of("w", w)[:, ::3])  # type: ignore[operator]
        model.p0.data.copy_(made.narrow(0, rank * 16, 16))  # type: ignore[union-attr,operator]
    out = run_recorded(recorder, model)
    real = func(w[:, ::3]).narrow(0, rank * 16, 16)  # type: ignore[operator]
    apart = (out.values[0].view(torch.int32) - real.contiguous().view(torch.int32)).abs()
    assert int(apart.max()) <= 2
    assert {exactness(expr) for _, expr in out.targets[0].pieces} == {"exact"}
