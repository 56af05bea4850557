"""What is asked of numbers in memory while targets are filled on the CPU."""

from __future__ import annotations

from typing import TypeGuard

import torch

from loadkit.tracing.blocks import DecodeBlocks
from loadkit.tracing.expressions import Call, Expr

__all__ = ["all_finite", "decodes_into", "same_bits"]


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether there is no infinity and no NaN, without a temporary of the tensor's size."""
    if not tensor.numel():
        return True
    if tensor.itemsize == 1:  # 8-bit floats cannot be compared
        tensor = tensor.to(torch.float32)
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def decodes_into(expr: Expr, into: torch.Tensor) -> TypeGuard[Call]:
    """Whether blocks can be decoded straight into memory; what they hold fits bfloat16 too."""
    return (
        isinstance(expr, Call)
        and isinstance(expr.func, DecodeBlocks)
        and into.device.type == "cpu"
        and into.dtype in (torch.float32, torch.bfloat16)
        and expr.size == tuple(into.size())
    )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have one dtype and shape, and no bit differs (NaNs are equal so)."""
    if a.dtype != b.dtype or a.size() != b.size():
        return False
    return torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )
