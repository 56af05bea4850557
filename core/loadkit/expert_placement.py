"""Which expert-parallel rank holds which experts of a mixture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from loadkit.errors import OptionError

__all__ = ["MAX_EXPERT_SLOTS", "ExpertPlacement"]

MAX_EXPERT_SLOTS = 1 << 20


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """A table of slots, the same for every layer: which logical expert each slot holds.

    Slots are dealt to the ranks in order, as evenly as they go: rank 0 has the first ones. An
    expert may have several slots (a redundant expert); every expert has at least one.

    Attributes:
        physical_to_logical: the logical expert of each slot, over all ranks.
        ep_size: how many ranks the slots are dealt to.

    Raises:
        OptionError: a slot is no expert's, an expert is left out, or a rank would have no slot.
    """

    physical_to_logical: tuple[int, ...]
    ep_size: int = 1

    def __post_init__(self) -> None:
        table: Any = self.physical_to_logical
        if not isinstance(table, (tuple, list)):
            raise OptionError(
                f"ExpertPlacement.physical_to_logical is {type(table).__name__}; "
                "accepted: a tuple of expert numbers"
            )
        object.__setattr__(self, "physical_to_logical", tuple(table))
        _require_count("ep_size", self.ep_size)
        if len(table) > MAX_EXPERT_SLOTS:
            raise OptionError(f"ExpertPlacement has {len(table)} slots; at most {MAX_EXPERT_SLOTS}")
        for slot, expert in enumerate(table):
            if not isinstance(expert, int) or isinstance(expert, bool) or expert < 0:
                raise OptionError(
                    f"ExpertPlacement.physical_to_logical[{slot}] = {expert!r} is no expert number"
                )
        if len(table) < self.ep_size:
            raise OptionError(
                f"ExpertPlacement deals {len(table)} slots to {self.ep_size} ranks: one would be "
                "without",
                hint="use a smaller ep_size, or add redundant experts",
            )
        left_out = sorted(set(range(max(table) + 1)) - set(table))
        if left_out:
            shown = ", ".join(map(str, left_out[:10])) + (" ..." if left_out[10:] else "")
            raise OptionError(
                f"ExpertPlacement gives no slot to expert(s) {shown} of {max(table) + 1}",
                detail={"experts": left_out[:1000]},
                hint="every expert needs at least one slot",
            )

    @classmethod
    def linear(cls, num_experts: int, ep_size: int, redundant: int = 0) -> ExpertPlacement:
        """Experts in order, then ``redundant`` more slots that begin again at expert 0.

        Raises:
            OptionError: a number is no count, or there are fewer slots than ranks.
        """
        return cls(_slots_of(num_experts, ep_size, redundant), ep_size)

    @classmethod
    def round_robin(cls, num_experts: int, ep_size: int, redundant: int = 0) -> ExpertPlacement:
        """As ``linear``, dealt one by one: rank r has slots r, r + ep_size, ... of that order.

        Raises:
            OptionError: a number is no count, or there are fewer slots than ranks.
        """
        order = _slots_of(num_experts, ep_size, redundant)
        return cls(
            tuple(expert for rank in range(ep_size) for expert in order[rank::ep_size]), ep_size
        )

    @classmethod
    def from_dict(cls, values: Any) -> ExpertPlacement:
        """What ``to_dict`` gave.

        Raises:
            OptionError: it is something else.
        """
        if not isinstance(values, dict) or set(values) != {"physical_to_logical", "ep_size"}:
            raise OptionError("an expert placement is {'physical_to_logical': [...], 'ep_size': N}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The placement as JSON-able values."""
        return {"physical_to_logical": list(self.physical_to_logical), "ep_size": self.ep_size}

    @property
    def num_experts(self) -> int:
        """How many logical experts there are."""
        return max(self.physical_to_logical) + 1

    @property
    def num_slots(self) -> int:
        """How many slots there are, over all ranks."""
        return len(self.physical_to_logical)

    def slots_of(self, ep_rank: int) -> range:
        """The slots of one rank."""
        each, more = divmod(self.num_slots, self.ep_size)
        start = ep_rank * each + min(ep_rank, more)
        return range(start, start + each + (ep_rank < more))

    def experts_of(self, ep_rank: int) -> tuple[int, ...]:
        """The logical expert of each of a rank's slots, in order."""
        slots = self.slots_of(ep_rank)
        return self.physical_to_logical[slots.start : slots.stop]

    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """For each expert the ranks that hold it, in order."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for rank in range(self.ep_size):
            for expert in dict.fromkeys(self.experts_of(rank)):
                found[expert].append(rank)
        return tuple(map(tuple, found))


def _slots_of(num_experts: int, ep_size: int, redundant: int) -> tuple[int, ...]:
    """Every expert, then the redundant ones."""
    _require_count("num_experts", num_experts)
    _require_count("ep_size", ep_size)
    _require_count("redundant", redundant, least=0)
    return tuple(slot % num_experts for slot in range(num_experts + redundant))


def _require_count(name: str, value: Any, least: int = 1) -> None:
    good = isinstance(value, int) and not isinstance(value, bool)
    if not good or not least <= value <= MAX_EXPERT_SLOTS:
        raise OptionError(
            f"ExpertPlacement: {name} = {value!r} is no number from {least} to {MAX_EXPERT_SLOTS}"
        )
