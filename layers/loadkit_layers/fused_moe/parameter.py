"""One parameter of many experts. E slots of this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from loadkit.errors import WeightLoadError
from loadkit_layers.parameter import BaseParameter, ColumnParameter
from loadkit_layers.sharding import Shard

__all__ = ["ExpertParameter"]


class ExpertParameter(BaseParameter):
    """The tensors of E experts, [E, ...]: each is what ``member`` makes of one slot's data.

    So whatever a linear layer's parameter can be cut like (plain, packed, scales of blocks), an
    expert's can, and by the same code.

    Args:
        data: the storage, dim 0 counting slots.
        member: makes the parameter of one expert from its data; it may refuse, naming
            ``parameter_name``, before anything is loaded.
        shards: what an expert's tensors are in it: gate and up, or the one down projection.
        **base: as ``BaseParameter``; ranks are those that cut an expert.
    """

    row_kind: ClassVar[str] = "expert"  # what a plan calls a copy into it

    shards: tuple[Shard, ...]
    member_class: type[BaseParameter]
    member_attrs: tuple[tuple[str, Any], ...]

    def __init__(
        self,
        data: torch.Tensor,
        *,
        member: Callable[..., BaseParameter],
        shards: Sequence[Shard],
        tp_rank: int,
        tp_size: int,
        weight_loader: Callable[..., None] | None = None,
        parameter_name: str = "",
    ) -> None:
        base: dict[str, Any] = {"tp_rank": tp_rank, "tp_size": tp_size}
        base["parameter_name"] = parameter_name
        super().__init__(data, weight_loader=weight_loader, **base)
        self.shards = tuple(shards)
        shape = torch.empty(data.shape[1:], dtype=data.dtype, device="meta")
        first = member(shape, **base)
        attrs = ((name, value) for name, value in vars(first).items() if name != "parameter_name")
        self.member_class, self.member_attrs = type(first), tuple(attrs)

    def expert(self, slot: int) -> BaseParameter:
        """One slot's parameter: a view, cut like a linear layer's."""
        data = self.data.select(0, slot)
        twin = torch.Tensor._make_subclass(self.member_class, data, False)
        twin.__dict__.update(self.member_attrs, parameter_name=self.parameter_name)
        return twin

    def load_expert(self, loaded_weight: torch.Tensor, slot: int, shard_id: str | None) -> None:
        """Copy the rank's part of one expert's tensor into a slot.

        Args:
            loaded_weight: one expert's tensor.
            slot: which of this rank's.
            shard_id: which of the shards it is; None: all of them, fused in their order.

        Raises:
            WeightLoadError: no such shard, or the shapes do not fit; nothing is written.
        """
        target = self.expert(slot)
        if len(self.shards) == 1 and shard_id in (None, self.shards[0].id):
            target.load_row_parallel_weight(loaded_weight)
        elif shard_id is not None:
            target.load_merged_column_weight(loaded_weight, shard=self.find_shard(shard_id))
        else:
            for shard, part in target.split_fused(loaded_weight, self.shards):
                target.load_merged_column_weight(part, shard=shard)

    def find_shard(self, shard_id: str) -> Shard:
        """The shard a weight loader was called with.

        Raises:
            WeightLoadError: there is none of that name.
        """
        for shard in self.shards:
            if shard.id == shard_id:
                return shard
        ids = [shard.id for shard in self.shards]
        raise WeightLoadError(
            f"parameter {self.parameter_name} has no shard {shard_id!r}; it has {ids}",
            parameter=self.parameter_name or None,
            detail={"shard_id": shard_id, "shard_ids": ids},
        )

    def part(self, slot: int, shard_id: str) -> torch.Tensor:
        """What of a slot is one shard: a view, as a checkpoint has it where nothing is cut.

        Raises:
            WeightLoadError: there is no shard of that name.
        """
        shard, member = self.find_shard(shard_id), self.expert(slot)
        if len(self.shards) == 1:
            return member.data
        if not isinstance(member, ColumnParameter):  # one number per shard
            return member.data.view(-1)[shard.index]
        size = member.output_units(shard.size)
        return member.data.narrow(member.output_dim, member.output_offset(shard), size)
