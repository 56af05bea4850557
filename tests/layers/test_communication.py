"""Two real gloo ranks compute what one computes; places that do not fit are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file

from helpers.two_ranks import forward_everything, rank_main
from loadkit.config import ParallelConfig
from loadkit.errors import DistributedError
from loadkit_layers import all_gather, all_reduce, init_parallel_groups, tp_group
from loadkit_layers.communication import global_rank

EXPECTED = forward_everything(ParallelConfig())


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(rank_main, args=(str(folder),), nprocs=2)
    return folder


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_two_ranks_compute_what_one_computes(ranks: Path, name: str, rank: int) -> None:
    got = load_file(ranks / f"rank{rank}.safetensors")[name]
    # Sums over ranks are in another order: a few units in the last place of numbers up to 100.
    assert torch.allclose(got, EXPECTED[name], rtol=1e-5, atol=1e-4)
    assert got.shape == EXPECTED[name].shape


def test_a_sum_over_two_ranks(ranks: Path) -> None:
    assert load_file(ranks / "rank1.safetensors")["sum"].tolist() == [3.0]


@pytest.mark.parametrize("rank", [0, 1])
def test_places_that_are_not_this_ranks_are_refused(ranks: Path, rank: int) -> None:
    other, larger, unmade = (ranks / f"rank{rank}.txt").read_text().splitlines()
    assert f"this process is rank {rank}" in other
    assert "torch.distributed has 2" in larger
    assert "init_parallel_groups" in unmade


def test_without_torch_distributed_the_error_says_what_to_do() -> None:
    parallel = ParallelConfig(tp_size=2)
    for call in (
        lambda: tp_group(parallel),
        lambda: init_parallel_groups(parallel),
        lambda: all_reduce(torch.ones(1), parallel),
        lambda: all_gather(torch.ones(1), parallel),
    ):
        with pytest.raises(DistributedError, match="init_process_group"):
            call()


def test_at_tp_1_nothing_is_communicated() -> None:
    x = torch.ones(2)
    assert all_reduce(x, ParallelConfig()) is x
    assert all_gather(x, ParallelConfig(pp_size=2)) is x


def test_ranks_of_the_world_count_tp_first_then_pp_then_dp() -> None:
    places = [
        ParallelConfig(tp_size=2, tp_rank=t, pp_size=3, pp_rank=p, dp_size=2, dp_rank=d)
        for d in range(2)
        for p in range(3)
        for t in range(2)
    ]
    assert [global_rank(place) for place in places] == list(range(12))


@pytest.fixture(params=range(8))
def eight(request: pytest.FixtureRequest) -> Iterator[int]:
    """One rank of a world of eight whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=8)
    yield request.param
    dist.destroy_process_group()


def test_the_tp_group_of_a_larger_world_is_the_neighbours(eight: int) -> None:
    parallel = ParallelConfig(
        tp_size=2,
        tp_rank=eight % 2,
        pp_size=2,
        pp_rank=eight // 2 % 2,
        dp_size=2,
        dp_rank=eight // 4,
    )
    with pytest.raises(DistributedError, match="dp 2 x pp 2 x tp 2 are not made"):
        tp_group(parallel)
    init_parallel_groups(parallel)
    first = eight // 2 * 2
    assert dist.get_process_group_ranks(tp_group(parallel)) == [first, first + 1]
