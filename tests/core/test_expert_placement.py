"""Which rank has which experts: the tables, what is refused, and how a placement travels."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from loadkit import ExpertPlacement
from loadkit.config import ParallelConfig
from loadkit.errors import OptionError
from loadkit.launch import run_ranks


def experts(placement: ExpertPlacement) -> list[tuple[int, ...]]:
    return [placement.experts_of(rank) for rank in range(placement.ep_size)]


def test_linear_gives_each_rank_neighbours() -> None:
    assert experts(ExpertPlacement.linear(8, 4)) == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_round_robin_deals_one_by_one() -> None:
    assert experts(ExpertPlacement.round_robin(8, 4)) == [(0, 4), (1, 5), (2, 6), (3, 7)]


@pytest.mark.parametrize("make", [ExpertPlacement.linear, ExpertPlacement.round_robin])
@pytest.mark.parametrize(
    ("number", "ep", "redundant"), [(7, 3, 0), (5, 4, 3), (3, 2, 7), (4, 8, 4)]
)
def test_every_expert_has_a_slot_and_ranks_differ_by_one_at_most(
    make: Any, number: int, ep: int, redundant: int
) -> None:
    placement = make(number, ep, redundant=redundant)
    sizes = [len(own) for own in experts(placement)]
    assert sum(sizes) == placement.num_slots == number + redundant
    assert max(sizes) - min(sizes) <= 1
    assert sorted({one for own in experts(placement) for one in own}) == list(range(number))
    assert placement.num_experts == number
    for expert, ranks in enumerate(placement.ranks()):
        assert ranks == tuple(r for r in range(ep) if expert in placement.experts_of(r))


def test_redundant_slots_begin_again_at_expert_0() -> None:
    assert experts(ExpertPlacement.linear(4, 2, redundant=2)) == [(0, 1, 2), (3, 0, 1)]
    assert ExpertPlacement.linear(4, 2, redundant=2).ranks() == ((0, 1), (0, 1), (0,), (1,))


@pytest.mark.parametrize(
    ("table", "ep", "said"),
    [
        ((0, 2), 1, "no slot to expert"),
        ((0, 1), 3, "2 slots to 3 ranks"),
        ((), 1, "0 slots"),
        ((0, -1), 1, "no expert number"),
        ((0, True), 1, "no expert number"),
        ((0, 1.0), 1, "no expert number"),
        ("01", 1, "accepted: a tuple"),
        ((0, 1), 0, "ep_size"),
        ((0, 1), "2", "ep_size"),
    ],
)
def test_a_table_that_is_none_is_refused(table: Any, ep: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        ExpertPlacement(table, ep)


@pytest.mark.parametrize("number", [0, -1, True, 2.0, "8", 1 << 30])
def test_numbers_that_are_no_counts_are_refused(number: Any) -> None:
    for make in (ExpertPlacement.linear, ExpertPlacement.round_robin):
        with pytest.raises(OptionError, match="num_experts"):
            make(number, 1)
    with pytest.raises(OptionError, match="ep_size"):
        ExpertPlacement.round_robin(8, 0)
    with pytest.raises(OptionError, match="redundant"):
        ExpertPlacement.linear(8, 1, redundant=-1)


def test_a_parallel_config_takes_only_a_placement_of_its_ranks() -> None:
    placement = ExpertPlacement.linear(8, 2)
    with pytest.raises(OptionError, match="2 expert-parallel"):
        ParallelConfig(tp_size=4, ep_size=4, expert_placement=placement)
    with pytest.raises(OptionError, match="accepted: an ExpertPlacement"):
        ParallelConfig(expert_placement=(0, 1))  # type: ignore[arg-type]


def test_a_placement_travels_with_the_config() -> None:
    placement = ExpertPlacement.round_robin(8, 4, redundant=4)
    for rank in range(4):
        parallel = ParallelConfig.for_rank(rank, tp_size=4, ep_size=4, expert_placement=placement)
        assert parallel.ep_rank == rank
        for copy in (
            pickle.loads(pickle.dumps(parallel)),
            ParallelConfig.from_dict(parallel.to_dict()),
        ):
            assert copy == parallel and hash(copy) == hash(parallel)
    assert ParallelConfig.from_dict(ParallelConfig().to_dict()) == ParallelConfig()
    for values in ({"tp": 2}, [], {"expert_placement": [0]}, {"expert_placement": {"ep_size": 1}}):
        with pytest.raises(OptionError):
            ParallelConfig.from_dict(values)


def test_started_ranks_have_the_placement_of_the_world() -> None:
    placement = ExpertPlacement.round_robin(6, 2, redundant=2)
    world = [
        ParallelConfig.for_rank(rank, tp_size=2, ep_size=2, expert_placement=placement)
        for rank in range(2)
    ]
    assert run_ranks("helpers.placed_ranks:place", {}, world) == world
