"""Which part of a model a rank holds."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from loadkit.errors import OptionError
from loadkit.expert_placement import ExpertPlacement

__all__ = ["MAX_WORLD_SIZE", "ParallelConfig"]

MAX_WORLD_SIZE = 1 << 20  # ranks

_AXES = ("tp", "pp", "ep", "dp")


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Which part of the model this rank holds. world = dp x pp x tp; ep divides dp x tp.

    Ranks are counted with tp innermost, then pp, then dp; ep re-uses the ranks of dp x tp.
    ``expert_placement`` says which experts an ep rank holds; None: ``ExpertPlacement.linear``.
    """

    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0
    dp_size: int = 1
    dp_rank: int = 0
    expert_placement: ExpertPlacement | None = None

    def __post_init__(self) -> None:
        for axis in _AXES:
            size: Any = getattr(self, f"{axis}_size")
            rank: Any = getattr(self, f"{axis}_rank")
            for name, value in ((f"{axis}_size", size), (f"{axis}_rank", rank)):
                if not isinstance(value, int) or isinstance(value, bool):
                    raise OptionError(f"ParallelConfig.{name} = {value!r} is no integer")
            if size < 1:
                raise OptionError(f"ParallelConfig.{axis}_size = {size} is less than 1")
            if not 0 <= rank < size:
                raise OptionError(
                    f"ParallelConfig.{axis}_rank = {rank} is not in 0..{size - 1} "
                    f"({axis}_size is {size})"
                )
        if (self.dp_size * self.tp_size) % self.ep_size:
            raise OptionError(
                f"ParallelConfig.ep_size = {self.ep_size} does not divide dp_size x tp_size = "
                f"{self.dp_size} x {self.tp_size}"
            )
        if self.world_size > MAX_WORLD_SIZE:
            raise OptionError(f"a world of {self.world_size} ranks; at most {MAX_WORLD_SIZE}")
        placement: Any = self.expert_placement
        if placement is not None and not isinstance(placement, ExpertPlacement):
            raise OptionError(
                f"ParallelConfig.expert_placement is {type(placement).__name__}; "
                "accepted: an ExpertPlacement, or None"
            )
        if placement is not None and placement.ep_size != self.ep_size:
            raise OptionError(
                f"ParallelConfig.expert_placement is for {placement.ep_size} expert-parallel "
                f"rank(s); ep_size is {self.ep_size}"
            )

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.dp_size * self.pp_size * self.tp_size

    @property
    def rank(self) -> int:
        """This rank's place in the world."""
        return (self.dp_rank * self.pp_size + self.pp_rank) * self.tp_size + self.tp_rank

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-able values."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        placement = self.expert_placement
        return {**found, "expert_placement": placement and placement.to_dict()}

    @classmethod
    def from_dict(cls, values: Any) -> ParallelConfig:
        """What ``to_dict`` gave.

        Raises:
            OptionError: it is something else.
        """
        known = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or not values.keys() <= known:
            raise OptionError(f"a ParallelConfig has the keys {sorted(known)}")
        placement = values.get("expert_placement")
        if placement is not None:
            values = {**values, "expert_placement": ExpertPlacement.from_dict(placement)}
        return cls(**values)

    @classmethod
    def for_rank(
        cls,
        rank: int,
        *,
        tp_size: int = 1,
        pp_size: int = 1,
        ep_size: int = 1,
        dp_size: int = 1,
        expert_placement: ExpertPlacement | None = None,
    ) -> ParallelConfig:
        """The part that rank ``rank`` of the world holds, the expert-parallel rank included.

        Raises:
            OptionError: there is no such rank, or the sizes do not fit.
        """
        whole = cls(tp_size=tp_size, pp_size=pp_size, ep_size=ep_size, dp_size=dp_size)
        if not 0 <= rank < whole.world_size:
            raise OptionError(f"rank {rank} is not in 0..{whole.world_size - 1}")
        outer, tp_rank = divmod(rank, tp_size)
        dp_rank, pp_rank = divmod(outer, pp_size)
        return cls(
            tp_size=tp_size,
            tp_rank=tp_rank,
            pp_size=pp_size,
            pp_rank=pp_rank,
            ep_size=ep_size,
            ep_rank=(dp_rank * tp_size + tp_rank) % ep_size,
            dp_size=dp_size,
            dp_rank=dp_rank,
            expert_placement=expert_placement,
        )
