"""Experts whose weights are plain numbers. T tokens, D width, I inner width, E slots, k chosen."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from loadkit.quantization import FusedMoEMethodBase
from loadkit.weight_memory import empty_weight
from loadkit_layers.fused_moe.parameter import ExpertParameter
from loadkit_layers.parameter import ModelWeightParameter

if TYPE_CHECKING:
    from loadkit_layers.fused_moe.layer import FusedMoE

__all__ = ["UnquantizedFusedMoEMethod", "run_experts"]

_weight = partial(ModelWeightParameter, output_dim=0, input_dim=1)


class UnquantizedFusedMoEMethod(FusedMoEMethodBase):
    """``w13_weight`` [E, 2 I, D] and ``w2_weight`` [E, D, I] in ``params_dtype``."""

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        E, D, I = num_experts, hidden_size, intermediate_size_per_partition
        for name, shape in (("w13", (E, 2 * I, D)), ("w2", (E, D, I))):
            data = empty_weight(shape, params_dtype)
            shards = getattr(layer, f"{name}_shards")
            param = ExpertParameter(data, member=_weight, shards=shards, **extra_weight_attrs)
            layer.register_parameter(f"{name}_weight", param)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, weights: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        moe: FusedMoE = layer  # type: ignore[assignment]
        w13: torch.Tensor = moe.w13_weight  # type: ignore[assignment]
        w2: torch.Tensor = moe.w2_weight  # type: ignore[assignment]

        def expert(slot: int, tokens: torch.Tensor) -> torch.Tensor:
            return F.linear(moe.act_fn(F.linear(tokens, w13[slot])), w2[slot])

        return run_experts(x, weights, slots, expert)


def run_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    slots: torch.Tensor,
    expert: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The weighted sum of what each token's experts make of it, one expert after the other.

    Args:
        x: [T, D].
        weights: [T, k].
        slots: [T, k]; -1 is left out.
        expert: (slot, tokens [n, D]) to [n, D].
    """
    k = slots.shape[-1]
    flat = slots.reshape(-1)
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat + 1).tolist()
    factors = weights.to(x.dtype).reshape(-1, 1)
    out = torch.zeros_like(x)
    start = counts[0] if counts else 0
    for slot, count in enumerate(counts[1:]):
        if count:
            chosen = order[start : start + count]
            tokens = chosen // k
            # A token is there once. index_add_ starts threads for sums however small.
            out[tokens] += expert(slot, x[tokens]) * factors[chosen]
            start += count
    return out
