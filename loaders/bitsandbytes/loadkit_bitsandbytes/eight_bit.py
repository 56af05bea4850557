"""Linear layers of int8 weights with a scale for each row: LLM.int8(). N outputs, K inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from loadkit.quantization import LinearMethodBase
from loadkit_bitsandbytes.library import functional
from loadkit_bitsandbytes.options import QuantOptions
from loadkit_bitsandbytes.parts import in_parts
from loadkit_bitsandbytes.saved import rows_of
from loadkit_layers.parameter import (
    BaseParameter,
    ChannelQuantScaleParameter,
    ModelWeightParameter,
)
from loadkit_layers.unquantized import UnquantizedLinearMethod

__all__ = [
    "OnlineEightBitMethod",
    "StoredEightBitMethod",
    "dequantise_rows",
    "multiply_rows",
    "quantise_rows",
]

_STEP = 1 << 18  # elements that are quantised at a time
_PER_STEP = 7.874015718698502e-3  # 1 / 127, as the library has it


def quantise_rows(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix [N, K] as int8, and float32 [N], as the library makes them: from float16."""
    library = functional()
    N, K = numbers.shape
    weight = torch.empty((N, K), dtype=torch.int8, device=numbers.device)
    scales = torch.empty(N, dtype=torch.float32, device=numbers.device)

    def some(start: int, end: int) -> None:
        rows = slice(start // K, end // K)
        codes, found, _ = library.int8_vectorwise_quant(numbers[rows].contiguous().half())
        weight[rows], scales[rows] = codes, found

    if N and K:
        in_parts(N * K, _STEP, K, numbers.device, some)
    return weight, scales


def dequantise_rows(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Numbers of int8 rows: float32 [N, K]; also of tensors that are not read yet."""
    return weight * scales.view(-1, 1) * _PER_STEP


def multiply_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    threshold: float,
) -> torch.Tensor:
    """``x [..., K]`` times int8 rows [N, K], transposed: [..., N] in x's dtype.

    Inputs are quantised too; columns with one above ``threshold`` are computed in floats.
    """
    if not x.numel() or not weight.numel():
        return nn.functional.linear(x, x.new_zeros(weight.shape), bias)
    library = functional()
    flat = x.reshape(-1, x.shape[-1])
    codes, stats, columns = library.int8_vectorwise_quant(
        flat.to(torch.float16), threshold=threshold
    )
    operators = torch.ops.bitsandbytes
    bias = None if bias is None else bias.to(x.dtype)
    if threshold > 0:
        out, _ = operators.int8_mixed_scaled_mm.default(
            flat, codes, weight, stats, scales, columns, bias
        )
    else:
        out = operators.int8_scaled_mm.default(
            codes, weight, stats, scales, bias=bias, dtype=x.dtype
        )
    made: torch.Tensor = out.view(*x.shape[:-1], weight.shape[0])
    return made


class EightBitMethod(LinearMethodBase):
    """The side that uses weights: ``weight`` int8 [N, K] and ``SCB`` float32 [N]."""

    def __init__(self, options: QuantOptions) -> None:
        self.options = options

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        weight, scales = layer.get_parameter("weight"), layer.get_parameter("SCB")
        return multiply_rows(x, weight.data, scales.data, bias, self.options.llm_int8_threshold)

    def dequantised(self, layer: nn.Module, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A layer's weight as numbers, [N, K] of this rank; float32, or ``dtype``."""
        weight, scales = layer.get_parameter("weight"), layer.get_parameter("SCB")
        return dequantise_rows(weight.data, scales.data).to(dtype or torch.float32)

    def checkpoint_tensors(
        self, layer: nn.Module, name: str, shard_id: Any
    ) -> dict[str, torch.Tensor] | None:
        """What a checkpoint has of one shard: suffix -> tensor; none of what goes with others."""
        if layer.get_parameter("weight").dtype != torch.int8:
            return None  # not quantised yet
        if name not in ("weight", "bias"):
            return {}
        own = rows_of(layer, layer.get_parameter(name).data, shard_id)
        if name == "bias":
            return {"": own}
        return {
            "": own,
            "/SCB": rows_of(layer, layer.get_parameter("SCB").data, shard_id),
            "/weight_format": torch.zeros((), dtype=torch.uint8),
        }


class StoredEightBitMethod(EightBitMethod):
    """Weights that are int8 in the checkpoint; any tp cuts them.

    Args:
        options: how they are computed with.
        tensors: the checkpoint's names of the matrices.
    """

    def __init__(self, options: QuantOptions, tensors: Sequence[str] = ()) -> None:
        super().__init__(options)
        self._tensors = tuple(tensors)

    def taken(self, layer: nn.Module) -> list[str]:
        """The checkpoint's matrices that the layer takes as they are."""
        return list(self._tensors)

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: Sequence[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        N, K = sum(output_partition_sizes), input_size_per_partition
        data = torch.empty((N, K), dtype=torch.int8)
        weight = ModelWeightParameter(data, output_dim=0, input_dim=1, **extra_weight_attrs)
        layer.register_parameter("weight", weight)
        scales = torch.empty(N, dtype=torch.float32)
        layer.register_parameter(
            "SCB", ChannelQuantScaleParameter(scales, output_dim=0, **extra_weight_attrs)
        )


class OnlineEightBitMethod(EightBitMethod):
    """A weight [N, K] in plain numbers, that becomes int8 once it is loaded."""

    uses_meta_device: ClassVar[bool] = True
    layout_version: ClassVar[int | None] = 1

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: Sequence[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        UnquantizedLinearMethod().create_weights(
            layer, input_size_per_partition, output_partition_sizes, input_size, output_size,
            params_dtype, **extra_weight_attrs,
        )  # fmt: skip

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Quantise each row by itself."""
        raw = layer.get_parameter("weight")
        weight, scales = quantise_rows(raw.data)
        rank, size = getattr(raw, "tp_rank", 0), getattr(raw, "tp_size", 1)
        path = str(getattr(raw, "parameter_name", ""))
        del layer._parameters["weight"]
        for name, tensor in (("weight", weight), ("SCB", scales)):
            called = f"{path.rpartition('.')[0]}.{name}" if "." in path else name
            param = BaseParameter(tensor, tp_rank=rank, tp_size=size, parameter_name=called)
            layer.register_parameter(name, param)

    def bytes_after_loading(self, layer: nn.Module) -> int:
        total = 0
        for name, param in layer.named_parameters(recurse=False):
            rows = param.shape[0]
            total += (
                param.numel() + 4 * rows if name == "weight" else param.numel() * param.itemsize
            )
        return total
