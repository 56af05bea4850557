"""Normalisation over the model width D, in float32 inside. Every rank holds the weights whole."""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.nn.functional as F

from loadkit.weight_memory import full_weight
from loadkit_layers.custom_op import CustomOp

__all__ = ["GemmaRMSNorm", "LayerNorm", "RMSNorm"]

Normed: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@CustomOp.register("rms_norm")
class RMSNorm(CustomOp):
    """x / sqrt(mean(x^2) + eps) * weight.

    Args:
        hidden_size: D.
        eps: added to the mean of squares.
        dtype: the weight's dtype; None: torch's default dtype.
        has_weight: False: no weight at all.
        weight_offset: added to the weight in float32; Gemma stores weight - 1 and wants 1.0, and
            multiplies before it rounds to the input's dtype where Llama rounds first.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        dtype: torch.dtype | None = None,
        has_weight: bool = True,
        weight_offset: float = 0.0,
    ) -> None:
        super().__init__()
        self.hidden_size, self.eps, self.weight_offset = hidden_size, eps, weight_offset
        start = full_weight((hidden_size,), 1.0 - weight_offset, dtype)
        weight = torch.nn.Parameter(start, requires_grad=False) if has_weight else None
        self.register_parameter("weight", weight)
        self.weight: torch.nn.Parameter | None

    def forward_native(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
        """Normalise x [..., D].

        Args:
            x: any float dtype.
            residual: added to ``x`` first, in their dtype.

        Returns:
            The normalised tensor; with a residual, also the sum that was normalised.
        """
        if residual is not None:
            x = residual = x + residual
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + self.eps)
        if self.weight is None:
            y = normed.to(x.dtype)
        elif self.weight_offset:
            y = (normed * (self.weight_offset + self.weight.float())).to(x.dtype)
        else:
            y = self.weight * normed.to(x.dtype)
        return y if residual is None else (y, residual)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, weight_offset={self.weight_offset}"


@CustomOp.register("gemma_rms_norm")
class GemmaRMSNorm(RMSNorm):
    """``RMSNorm`` with Gemma's offset of 1."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, *, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(hidden_size, eps, dtype=dtype, weight_offset=1.0)


@CustomOp.register("layer_norm")
class LayerNorm(CustomOp):
    """(x - mean) / sqrt(variance + eps) * weight + bias.

    Args:
        hidden_size: D.
        eps: added to the variance.
        bias: False: no bias.
        dtype: the parameters' dtype; None: torch's default dtype.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.eps = hidden_size, eps
        weight = full_weight((hidden_size,), 1.0, dtype)
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        zeros = full_weight((hidden_size,), 0.0, dtype) if bias else None
        self.register_parameter(
            "bias", None if zeros is None else torch.nn.Parameter(zeros, requires_grad=False)
        )
        self.bias: torch.nn.Parameter | None

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x [..., D] of any float dtype."""
        return F.layer_norm(x, (self.hidden_size,), self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, bias={self.bias is not None}"
