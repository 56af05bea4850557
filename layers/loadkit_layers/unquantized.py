"""The method of a layer whose weight is plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from loadkit.quantization import LinearMethodBase
from loadkit.weight_memory import empty_weight
from loadkit_layers.parameter import ModelWeightParameter

__all__ = ["UnquantizedLinearMethod"]


class UnquantizedLinearMethod(LinearMethodBase):
    """One weight [N, K] in ``params_dtype``; y = x W^T + b."""

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: Sequence[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        shape = (sum(output_partition_sizes), input_size_per_partition)
        data = empty_weight(shape, params_dtype)
        weight = ModelWeightParameter(data, output_dim=0, input_dim=1, **extra_weight_attrs)
        layer.register_parameter("weight", weight)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        return F.linear(x, weight, bias)

    def embedding(self, layer: torch.nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
        """The rows of the weight, for the vocabulary layers."""
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        return F.embedding(input_ids, weight)
