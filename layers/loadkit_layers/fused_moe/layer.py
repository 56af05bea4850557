"""``FusedMoE``: a layer's experts, cut over tp ranks and dealt to ep ranks.

T tokens, D width, I inner width of an expert, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from loadkit.config import ParallelConfig
from loadkit.errors import ModelError, UsageError
from loadkit.quantization import FusedMoEMethodBase, QuantizationConfig
from loadkit_layers.activation import get_act_and_mul_fn
from loadkit_layers.communication import all_reduce
from loadkit_layers.fused_moe.ranks import ExpertRanks
from loadkit_layers.fused_moe.routing import Router
from loadkit_layers.fused_moe.tensors import ExpertTensors, Layout
from loadkit_layers.fused_moe.unquantized import UnquantizedFusedMoEMethod
from loadkit_layers.sharding import Shard, require_divisible

__all__ = ["FusedMoE"]


class FusedMoE(ExpertTensors):
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

    loader_looks_at = ("ranks", "num_experts")  # see tracing.known_copies

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
        ranks = ExpertRanks.of(parallel, router.num_experts, prefix)
        super().__init__(ranks, prefix, disk_layout, disk_names)
        self.router, self.parallel = router, parallel
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.quant_config, self.reduce_results = quant_config, reduce_results
        self.params_dtype = params_dtype or torch.get_default_dtype()
        self.tp_rank, self.tp_size = self.ranks.tp_rank, self.ranks.tp_size
        require_divisible(prefix, self.tp_size, [intermediate_size], unit="expert width")
        self.intermediate_size_per_partition = size = intermediate_size // self.tp_size
        self.w13_shards = (Shard("w1", 0, 0, size), Shard("w3", 1, size, size))
        self.w2_shards = (Shard("w2", 0, 0, hidden_size, replicas=self.tp_size),)
        self.act_fn = get_act_and_mul_fn(activation)
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
