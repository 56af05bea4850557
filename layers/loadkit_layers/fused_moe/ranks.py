"""Which experts of a layer a rank holds, and which part of each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from loadkit.config import ParallelConfig
from loadkit.errors import ModelError, OptionError
from loadkit.expert_placement import ExpertPlacement

__all__ = ["ExpertRanks"]


@dataclass(frozen=True, slots=True)
class ExpertRanks:
    """One rank's place among those that share a layer's experts.

    The dp x tp ranks of a stage are dealt to ep groups one by one; ranks of one group hold the
    same experts and cut each of them. Without expert parallelism every tp rank has all experts.

    Attributes:
        placement: which slots there are, and whose.
        ep_rank: this rank's number among the ranks that differ in their experts.
        tp_rank: its number among the ranks that cut its experts.
        tp_size: how many these are.
        one_replica: a sum over the tp ranks is the sum over all experts and parts.
    """

    placement: ExpertPlacement
    ep_rank: int
    tp_rank: int
    tp_size: int
    one_replica: bool

    @classmethod
    def of(cls, parallel: ParallelConfig, num_experts: int, prefix: str) -> ExpertRanks:
        """The place that ``parallel`` says.

        Raises:
            OptionError: ``ep_rank`` is not the one that the dp and tp ranks lead to.
            ModelError: the placement is of another number of experts, or there are fewer experts
                than ep ranks.
        """
        ep = parallel.ep_size
        flat = parallel.dp_rank * parallel.tp_size + parallel.tp_rank
        if parallel.ep_rank != flat % ep:
            raise OptionError(
                f"ep_rank {parallel.ep_rank} of {ep}: rank {flat} of dp {parallel.dp_size} x tp "
                f"{parallel.tp_size} has ep_rank {flat % ep}",
                hint="ParallelConfig.for_rank gives every rank its place",
            )
        placement = parallel.expert_placement
        if placement is None:
            placement = _linear(num_experts, ep, prefix)
        if placement.num_experts != num_experts:
            raise ModelError(
                f"layer {prefix or '(no prefix)'} has {num_experts} experts; the expert placement "
                f"is of {placement.num_experts}",
                code="EXPERT_PLACEMENT",
                detail={"experts": num_experts, "placed": placement.num_experts, "layer": prefix},
                hint=f"make the placement for num_experts={num_experts}",
            )
        if parallel.tp_size % ep == 0:
            return cls(
                placement,
                parallel.ep_rank,
                parallel.tp_rank // ep,
                parallel.tp_size // ep,
                one_replica=True,
            )
        size = parallel.dp_size * parallel.tp_size // ep
        return cls(placement, parallel.ep_rank, flat // ep, size, one_replica=False)

    def slots(self) -> dict[int, tuple[int, ...]]:
        """This rank's slots of each expert it holds, counted from its first one."""
        return _slots(self.placement, self.ep_rank)

    def elsewhere(self) -> dict[str, str]:
        """Why this rank holds nothing of an expert, by the expert's number as names spell it."""
        return _elsewhere(self.placement, self.ep_rank)

    def table(self) -> list[list[int]]:
        """For each expert its slots in order, as this rank's; -1 is another rank's."""
        own = self.placement.slots_of(self.ep_rank)
        found: list[list[int]] = [[] for _ in range(self.placement.num_experts)]
        for slot, expert in enumerate(self.placement.physical_to_logical):
            found[expert].append(slot - own.start if slot in own else -1)
        return found


def _linear(num_experts: int, ep: int, prefix: str) -> ExpertPlacement:
    if num_experts < ep:
        raise ModelError(
            f"layer {prefix or '(no prefix)'}: {num_experts} experts for {ep} expert-parallel "
            "ranks: some would have none",
            code="EXPERT_PLACEMENT",
            detail={"experts": num_experts, "ep_size": ep, "layer": prefix},
            hint=f"use ep_size {num_experts} or less, or a placement with redundant experts",
        )
    return ExpertPlacement.linear(num_experts, ep)


# The layers of a model ask the same: the tables are made once.
@lru_cache(maxsize=64)
def _slots(placement: ExpertPlacement, ep_rank: int) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    for slot, expert in enumerate(placement.experts_of(ep_rank)):
        found[expert] = (*found.get(expert, ()), slot)
    return found


@lru_cache(maxsize=64)
def _elsewhere(placement: ExpertPlacement, ep_rank: int) -> dict[str, str]:
    found: dict[str, str] = {}
    for expert, ranks in enumerate(placement.ranks()):
        if ep_rank not in ranks:
            one = f"ep rank {ranks[0]}" if len(ranks) == 1 else f"ep ranks {_listed(ranks)}"
            found[str(expert)] = f"expert {expert} lives on {one}"
    return found


def _listed(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks[:-1])) + f" and {ranks[-1]}"
