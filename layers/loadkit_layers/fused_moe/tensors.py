"""A module whose parameters are experts: what checkpoints call its tensors, and how they load."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import torch

from loadkit.auto_weights_loader import AutoWeightsLoader
from loadkit.errors import WeightLoadError
from loadkit.sharded_name import ShardedName
from loadkit.text import printable
from loadkit.tracing import report_misfit
from loadkit.tracing.regions import copies_regions
from loadkit.turns import is_repacked
from loadkit_layers.fused_moe.missing import describe_missing
from loadkit_layers.fused_moe.names import ExpertShard, find_place
from loadkit_layers.fused_moe.parameter import ExpertParameter
from loadkit_layers.fused_moe.ranks import ExpertRanks

__all__ = ["ExpertTensors", "Layout"]

Layout = Literal["output_input", "input_output"]


class ExpertTensors(torch.nn.Module):
    """The loading side of ``FusedMoE``.

    Args:
        ranks: which experts this rank has, and which part of them.
        prefix: the module's dotted name, for errors.
        disk_layout: of a projection on disk: outputs x inputs, or transposed.
        disk_names: what checkpoints call gate, up and down.
    """

    def __init__(
        self, ranks: ExpertRanks, prefix: str, disk_layout: Layout, disk_names: Sequence[str]
    ) -> None:
        super().__init__()
        self.ranks, self.prefix = ranks, prefix
        self.num_experts = ranks.placement.num_experts
        self.disk_layout, self.disk_names = disk_layout, tuple(disk_names)
        self._slots, self._elsewhere = ranks.slots(), ranks.elsewhere()

    def skip_weight(self, name: str) -> str | None:
        """Why this rank holds nothing of the tensor ``name`` (relative to the layer), or None."""
        return self._elsewhere.get(name.partition(".")[0])

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Place tensors under names relative to the layer; gives the parameters that got any.

        One expert's: ``5.gate_proj.weight``, ``5.w1.weight``, ``5.gate_up_proj.weight`` (gate and
        up fused); all experts' in one: ``gate_up_proj``, ``down_proj``, ``w1``, ...

        Raises:
            WeightLoadError: a tensor without a place, or one that does not fit.
        """
        return AutoWeightsLoader(self).load_weights(self._placed(weights))

    def _placed(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors under their parameters' names, those of other ranks left out."""
        for name, tensor in weights:
            if (reason := self.skip_weight(name)) is not None:
                place = ShardedName(name, like=name)
                report_misfit("SKIPPED", name=place.checkpoint_name, message=reason)
                continue
            found = find_place(str(name), getattr(name, "shard_id", None))
            if found is None or found[0] not in self._parameters:
                yield name, tensor
            elif found[1].expert is not None and found[1].expert >= self.num_experts:
                self._refuse(ShardedName(name, like=name), found[1].expert)
            else:
                place = ShardedName(found[0], found[1], like=name)
                own = str(name) in self._parameters  # as it is in memory, whatever is on disk
                yield place, tensor if own else self._turned(tensor, found[1].expert is None)

    def _refuse(self, name: ShardedName, expert: int) -> None:
        """Report, or raise, that a checkpoint has more experts than the config."""
        message = (
            f"tensor '{printable(name.checkpoint_name)}' is of expert {expert}; the config has "
            f"{self.num_experts} experts, 0 to {self.num_experts - 1}"
        )
        hint = "check the number of experts in config.json"
        if not report_misfit(
            "UNEXPECTED", name=name.checkpoint_name, target=name.path, message=message, hint=hint
        ):
            raise WeightLoadError(
                message,
                code="UNEXPECTED_TENSOR",
                tensor=name.checkpoint_name,
                parameter=name.path,
                detail={"expert": expert, "experts": self.num_experts},
                hint=hint,
            )

    @copies_regions
    def weight_loader(
        self,
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str | ExpertShard = "",
        shard_id: str | None = None,
        expert_id: int | None = None,
        return_success: bool = False,
    ) -> bool | None:
        """Copy this rank's part of a checkpoint tensor into one of the layer's parameters.

        Args:
            param: an ``ExpertParameter`` of this layer.
            loaded_weight: one expert's tensor, outputs x inputs, or all experts' with a dim before.
            weight_name: its name, for nothing; an ``ExpertShard`` here says the next two.
            shard_id: "w1" (gate), "w3" (up) or "w2" (down); None: all that the parameter has.
            expert_id: which expert, over all ranks; None: all of them.
            return_success: say whether this rank has the expert.

        Raises:
            WeightLoadError: no such shard or expert, or the shapes do not fit.
        """
        if isinstance(weight_name, ExpertShard):
            shard_id, expert_id = weight_name
        if not isinstance(param, ExpertParameter):
            raise WeightLoadError(
                f"a parameter of layer {self.prefix} is a {type(param).__name__}",
                hint="a method for experts makes its parameters as ExpertParameter",
            )
        if expert_id is None:
            slots = [(slot, expert) for expert, own in self._slots.items() for slot in own]
            whole = self._of_all_experts(param, loaded_weight)
            for slot, expert in sorted(slots):
                param.load_expert(whole.select(0, expert), slot, shard_id)
            return True if return_success else None
        if not 0 <= expert_id < self.num_experts:
            raise WeightLoadError(
                f"layer {self.prefix} has no expert {expert_id}; it has {self.num_experts}",
                detail={"expert": expert_id, "experts": self.num_experts},
            )
        own = self._slots.get(expert_id, ())
        for slot in own:
            param.load_expert(loaded_weight, slot, shard_id)
        return bool(own) if return_success else None

    def _turned(self, tensor: torch.Tensor, of_all: bool = False) -> torch.Tensor:
        """A tensor of one expert (or all) from the layout on disk to outputs x inputs, or back."""
        if self.disk_layout == "input_output" and tensor.dim() > 1 + of_all:
            return tensor.transpose(-1, -2)
        return tensor

    def _of_all_experts(self, param: ExpertParameter, loaded: torch.Tensor) -> torch.Tensor:
        """A tensor whose first dim counts all experts."""
        if loaded.dim() and loaded.shape[0] == self.num_experts:
            return loaded
        found = f"{loaded.shape[0]} experts" if loaded.dim() == param.dim() else "no experts"
        raise WeightLoadError(
            f"the checkpoint tensor is {list(loaded.shape)}, {found}; layer {self.prefix} has "
            f"{self.num_experts} experts",
            parameter=param.parameter_name or None,
            detail={"checkpoint_shape": list(loaded.shape), "experts": self.num_experts},
            hint="check the number of experts in config.json",
        )

    def describe_missing(self, name: str, spans: Sequence[tuple[int, int]]) -> list[str]:
        """Sentences about elements [start, end) of parameter ``name`` that nothing was written to.

        Each is one problem of a plan; none: there is nothing to add to what the plan says.
        """
        param = self._parameters.get(name)
        if not isinstance(param, ExpertParameter):
            return []
        called = dict(zip(("w1", "w3", "w2"), self.disk_names, strict=True))
        return describe_missing(param, spans, self._slots, self.num_experts, called)

    def checkpoint_names(self, name: str) -> list[tuple[str, ExpertShard]] | None:
        """The checkpoint tensors that parameter ``name`` is made of, relative to the layer."""
        head, _, suffix = name.partition("_")
        gate, up, down = self.disk_names
        parts = {"w13": (("w1", gate), ("w3", up)), "w2": (("w2", down),)}.get(head)
        if parts is None:
            return None
        return [
            (f"{expert}.{projection}.{suffix}", ExpertShard(shard_id, expert))
            for expert in sorted(self._slots)
            for shard_id, projection in parts
        ]

    def checkpoint_part(self, name: str, shard_id: ExpertShard | None) -> torch.Tensor | None:
        """The checkpoint tensor that is a part of parameter ``name``: a view.

        None where the layer's method changed the weights after loading: then it has to say.
        """
        param = None if is_repacked(self) else self._parameters.get(name)
        if not isinstance(shard_id, ExpertShard) or not isinstance(param, ExpertParameter):
            return None
        part, expert = shard_id
        if expert is None or part is None or expert not in self._slots:
            return None
        return self._turned(param.part(self._slots[expert][0], part))
