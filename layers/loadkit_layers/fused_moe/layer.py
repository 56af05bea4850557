"""``FusedMoE``: a layer's experts, cut over tp ranks and dealt to ep ranks, and how they load.

T tokens, D width, I inner width of an expert, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import torch

from loadkit.auto_weights_loader import AutoWeightsLoader
from loadkit.config import ParallelConfig
from loadkit.errors import ModelError, UsageError, WeightLoadError
from loadkit.plan_targets import is_repacked
from loadkit.quantization import FusedMoEMethodBase, QuantizationConfig
from loadkit.sharded_name import ShardedName
from loadkit.text import printable
from loadkit.tracing import report_misfit
from loadkit_layers.activation import get_act_and_mul_fn
from loadkit_layers.communication import all_reduce
from loadkit_layers.fused_moe.names import ExpertShard, find_place
from loadkit_layers.fused_moe.parameter import ExpertParameter
from loadkit_layers.fused_moe.ranks import ExpertRanks
from loadkit_layers.fused_moe.routing import Router
from loadkit_layers.fused_moe.unquantized import UnquantizedFusedMoEMethod
from loadkit_layers.sharding import Shard, require_divisible

__all__ = ["FusedMoE"]

Layout = Literal["output_input", "input_output"]


class FusedMoE(torch.nn.Module):
    """E experts ``down(act(gate(x)) * up(x))`` of which each token uses a few.

    ``w13_weight [slots, 2 I/R, D]`` holds gate and up, ``w2_weight [slots, D, I/R]`` down, of the
    experts that this rank has (R ranks cut each of them).

    Args:
        router: how experts are chosen.
        hidden_size: D.
        intermediate_size: I, over all ranks.
        parallel: this rank's place; its ``expert_placement`` says which experts it has.
        activation: as config.json names it.
        params_dtype: the parameters' dtype; None: torch's default dtype.
        quant_config: where the layer's method comes from; None: plain weights.
        prefix: the layer's dotted name, for quantisation and errors.
        reduce_results: sum over the ranks; False: the caller does.
        disk_layout: of a projection on disk: "output_input", as a linear layer's weight, or
            "input_output", transposed.
        disk_names: what checkpoints call gate, up and down, for saving and errors; loading knows
            the usual names.

    Raises:
        ModelError: ``TP_INDIVISIBLE``; EXPERT_PLACEMENT, a placement of other experts; or the
            quantisation has no method for experts.
        OptionError: ``parallel`` is no rank of its layout.
    """

    def __init__(
        self,
        router: Router,
        hidden_size: int,
        intermediate_size: int,
        *,
        parallel: ParallelConfig,
        activation: str = "silu",
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        reduce_results: bool = True,
        disk_layout: Layout = "output_input",
        disk_names: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        super().__init__()
        self.router, self.num_experts = router, router.num_experts
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.parallel, self.prefix = parallel, prefix
        self.quant_config, self.reduce_results = quant_config, reduce_results
        self.disk_layout, self.disk_names = disk_layout, tuple(disk_names)
        self.params_dtype = params_dtype or torch.get_default_dtype()
        self.ranks = ExpertRanks.of(parallel, self.num_experts, prefix)
        self.tp_rank, self.tp_size = self.ranks.tp_rank, self.ranks.tp_size
        require_divisible(prefix, self.tp_size, [intermediate_size], unit="expert width")
        self.intermediate_size_per_partition = size = intermediate_size // self.tp_size
        self.w13_shards = (Shard("w1", 0, 0, size), Shard("w3", 1, size, size))
        self.w2_shards = (Shard("w2", 0, 0, hidden_size, replicas=self.tp_size),)
        self.act_fn = get_act_and_mul_fn(activation)
        self._slots, self._elsewhere = self.ranks.slots(), self.ranks.elsewhere()
        self.quant_method = self._method()
        self.quant_method.create_weights(
            self,
            len(self.ranks.placement.slots_of(self.ranks.ep_rank)),
            hidden_size,
            size,
            self.params_dtype,
            weight_loader=self.weight_loader,
            tp_rank=self.tp_rank,
            tp_size=self.tp_size,
        )
        self._name_parameters()
        table = self.ranks.table()
        width = max(map(len, table))
        rows = [(slots * width)[:width] for slots in table]
        self.register_buffer("slot_table", torch.tensor(rows), persistent=False)
        self.register_buffer("copies", torch.tensor([*map(len, table)]), persistent=False)

    def _method(self) -> FusedMoEMethodBase:
        """What makes, applies and post-processes the weights."""
        found = self.quant_config.get_quant_method(self, self.prefix) if self.quant_config else None
        if found is None:
            return UnquantizedFusedMoEMethod()
        if not isinstance(found, FusedMoEMethodBase):
            raise ModelError(
                f"layer {self.prefix or '(no prefix)'}: {type(found).__name__} is no method for "
                "experts",
                hint="its QuantizationConfig has to give FusedMoE layers a FusedMoEMethodBase",
            )
        return found

    def _name_parameters(self) -> None:
        for name, param in self.named_parameters(recurse=False):
            path = f"{self.prefix}.{name}" if self.prefix else name
            setattr(param, "parameter_name", path)  # noqa: B010
            if isinstance(param, ExpertParameter):
                param.member_attrs["parameter_name"] = path

    # -- loading ---------------------------------------------------------------------------------

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
                yield ShardedName(found[0], found[1], like=name), tensor

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
            loaded_weight: one expert's tensor, or all experts' with a dim before.
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
                param.load_expert(self._turned(whole.select(0, expert)), slot, shard_id)
            return True if return_success else None
        if not 0 <= expert_id < self.num_experts:
            raise WeightLoadError(
                f"layer {self.prefix} has no expert {expert_id}; it has {self.num_experts}",
                detail={"expert": expert_id, "experts": self.num_experts},
            )
        own = self._slots.get(expert_id, ())
        for slot in own:
            param.load_expert(self._turned(loaded_weight), slot, shard_id)
        return bool(own) if return_success else None

    def _turned(self, loaded_weight: torch.Tensor) -> torch.Tensor:
        """One expert's tensor as outputs x inputs."""
        if self.disk_layout == "input_output" and loaded_weight.dim() > 1:
            return loaded_weight.transpose(-1, -2)
        return loaded_weight

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

    # -- what is where ---------------------------------------------------------------------------

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

    # -- forward ---------------------------------------------------------------------------------

    def forward(
        self,
        hidden: torch.Tensor,
        router_logits: torch.Tensor,
        correction_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run each token through its experts.

        Args:
            hidden: [T, D].
            router_logits: [T, E], the gate's output.
            correction_bias: [E], as ``Router.route`` takes it.

        Returns:
            [T, D]; without ``reduce_results`` this rank's part of the sum.

        Raises:
            UsageError: experts are dealt to ranks that have other tokens.
        """
        if not self.ranks.one_replica:
            raise UsageError(
                f"layer {self.prefix}: ep {self.parallel.ep_size} deals the experts to ranks of "
                f"several data-parallel replicas; tp {self.parallel.tp_size} of one is no multiple",
                hint="such ranks can load and save; to compute, use an ep size that divides tp",
            )
        weights, experts = self.router.route(router_logits, correction_bias)
        out = self.quant_method.apply(self, hidden, weights, self._slots_of(experts))
        if self.reduce_results and self.parallel.tp_size > 1:
            out = all_reduce(out, self.parallel)
        return out

    def _slots_of(self, experts: torch.Tensor) -> torch.Tensor:
        """This rank's slots of chosen experts [T, k], -1 for others.

        Tokens take turns with the slots of a redundant expert, the same on every rank.
        """
        table: torch.Tensor = self.slot_table  # type: ignore[assignment]
        copies: torch.Tensor = self.copies  # type: ignore[assignment]
        if table.shape[1] == 1:
            return table[experts, 0]
        turn = torch.arange(experts.shape[0], device=experts.device)[:, None]
        return table[experts, turn % copies[experts]]

    def extra_repr(self) -> str:
        return (
            f"experts={self.num_experts}, slots={sum(map(len, self._slots.values()))}, "
            f"in={self.hidden_size}, inner={self.intermediate_size_per_partition}, "
            f"ep_rank={self.ranks.ep_rank}, tp_rank={self.tp_rank}, tp_size={self.tp_size}"
        )
