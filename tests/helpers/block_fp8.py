"""A quantisation method of the tests' own: 8-bit floats with one scale per block of the weight.

Weights are ``weight`` in float8_e4m3fn with ``weight_scale_inv`` in float32; applied, they are
dequantised first. It is what a plugin would write, in the fewest lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from loadkit import tables
from loadkit.quantization import (
    FusedMoEMethodBase,
    LinearMethodBase,
    QuantizationConfig,
    QuantizeMethodBase,
)
from loadkit_layers import (
    BlockQuantScaleParameter,
    ExpertParameter,
    FusedMoE,
    LinearBase,
    ModelWeightParameter,
    run_experts,
)

__all__ = ["NAME", "BlockFp8Config", "dequantised", "register_block_fp8"]

NAME = "test_block_fp8"
FP8 = torch.float8_e4m3fn


def register_block_fp8() -> None:
    """Make ``quant_method: test_block_fp8`` known in this process and in those it starts."""
    path = f"{BlockFp8Config.__module__}:{BlockFp8Config.__name__}"
    tables.quantization.register(NAME, path, override=True)


def dequantised(weight: torch.Tensor, scale: torch.Tensor, block: Sequence[int]) -> torch.Tensor:
    """``weight [N, K]`` times the scale of each element's block, in float32."""
    spread = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return weight.float() * spread[: weight.shape[0], : weight.shape[1]]


class BlockFp8Config(QuantizationConfig):
    """``weight_block_size``: rows and columns of a weight that share a scale."""

    def __init__(self, block: Sequence[int], ignored: Sequence[str] = ()) -> None:
        super().__init__()
        self.block, self.ignored = tuple(block), tuple(ignored)

    @classmethod
    def get_name(cls) -> str:
        return NAME

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def get_config_filenames(cls) -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> BlockFp8Config:
        return cls(config["weight_block_size"], config.get("ignored_layers", ()))

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if prefix.rpartition(".")[2] in self.ignored:
            return None
        if isinstance(layer, FusedMoE):
            return BlockFp8MoEMethod(self.block)
        return BlockFp8LinearMethod(self.block) if isinstance(layer, LinearBase) else None


class BlockFp8LinearMethod(LinearMethodBase):
    def __init__(self, block: tuple[int, ...]) -> None:
        self.block = block

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
        dims: dict[str, Any] = {"output_dim": 0, "input_dim": 1, **extra_weight_attrs}
        layer.register_parameter(
            "weight", ModelWeightParameter(torch.empty(shape, dtype=FP8), **dims)
        )
        make, shards = scales(self.block, layer.output_shards, shape[1], input_size)  # type: ignore[arg-type]
        blocks = BlockQuantScaleParameter.shape_for(shards, shape[1], *self.block)
        name = f"{layer.prefix}.weight_scale_inv"
        scale = make(
            torch.empty(blocks, dtype=torch.float32), parameter_name=name, **extra_weight_attrs
        )
        layer.register_parameter("weight_scale_inv", scale)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        sizes = [shard.size for shard in layer.output_shards]  # type: ignore[union-attr]
        weight = whole(layer.weight, layer.weight_scale_inv, sizes, self.block)  # type: ignore[arg-type]
        y: torch.Tensor = F.linear(x.float(), weight).to(x.dtype)
        return y


class BlockFp8MoEMethod(FusedMoEMethodBase):
    def __init__(self, block: tuple[int, ...]) -> None:
        self.block = block

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        E, D, inner = num_experts, hidden_size, intermediate_size_per_partition
        assert isinstance(layer, FusedMoE)
        for name, rows, columns, all_columns in (
            ("w13", 2 * inner, D, D),
            ("w2", D, inner, layer.intermediate_size),
        ):
            common = {"shards": getattr(layer, f"{name}_shards"), **extra_weight_attrs}
            weight = partial(ModelWeightParameter, output_dim=0, input_dim=1)
            data = torch.empty((E, rows, columns), dtype=FP8)
            layer.register_parameter(
                f"{name}_weight", ExpertParameter(data, member=weight, **common)
            )
            make, shards = scales(self.block, common["shards"], columns, all_columns)
            blocks = BlockQuantScaleParameter.shape_for(shards, columns, *self.block)
            full = f"{name}_weight_scale_inv"
            scale = ExpertParameter(
                torch.empty((E, *blocks), dtype=torch.float32),
                member=make,
                parameter_name=f"{layer.prefix}.{full}",
                **common,
            )
            layer.register_parameter(full, scale)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, weights: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        moe: Any = layer
        inner = moe.intermediate_size_per_partition

        def expert(slot: int, tokens: torch.Tensor) -> torch.Tensor:
            up = whole(
                moe.w13_weight[slot], moe.w13_weight_scale_inv[slot], [inner] * 2, self.block
            )
            down = whole(
                moe.w2_weight[slot], moe.w2_weight_scale_inv[slot], [x.shape[-1]], self.block
            )
            y: torch.Tensor = F.linear(moe.act_fn(F.linear(tokens, up)), down)
            return y

        return run_experts(x.float(), weights, slots, expert).to(x.dtype)


def scales(
    block: Sequence[int], shards: Sequence[Any], columns: int, all_columns: int
) -> tuple[Any, Sequence[Any]]:
    """What makes the scales' parameter of a weight with these shards."""
    make = partial(
        BlockQuantScaleParameter,
        block_n=block[0],
        block_k=block[1],
        shards=shards,
        input_size_per_partition=columns,
        input_size=all_columns,
    )
    return make, shards


def whole(
    weight: torch.Tensor, scale: torch.Tensor, sizes: Sequence[int], block: Sequence[int]
) -> torch.Tensor:
    """A fused weight dequantised shard by shard: each begins a block of its own."""
    parts = scale.split([-(-size // block[0]) for size in sizes])
    return torch.cat(
        [dequantised(w, s, block) for w, s in zip(weight.split(list(sizes)), parts, strict=True)]
    )
