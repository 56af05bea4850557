"""``ContractModel``: a decoder's parameters over R tensor-parallel ranks, made of the core alone.

D model width, H heads, K kv heads, F inner width, V vocabulary. It loads as any model does, by a
``WeightsMapper`` and weight loaders of its parameters; it computes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from loadkit.auto_weights_loader import AutoWeightsLoader
from loadkit.errors import WeightLoadError
from loadkit.mapper import WeightsMapper
from loadkit.quantization_base import LinearMethodBase
from loadkit.weight_loaders import default_weight_loader

if TYPE_CHECKING:
    from loadkit.config import LoadkitConfig

__all__ = ["ContractModel"]


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint tensor in a fused parameter: its rows there, on this rank."""

    id: int | str
    index: int
    offset: int
    size: int


class PlainMethod(LinearMethodBase):
    """Weights as they are."""

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
        data = torch.empty(
            sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype
        )
        weight = nn.Parameter(data, requires_grad=False)
        for name, value in {"output_dim": 0, "input_dim": 1, **extra_weight_attrs}.items():
            setattr(weight, name, value)
        layer.register_parameter("weight", weight)

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        weight: Any = layer.weight
        return nn.functional.linear(x, weight, bias)


class Cut(nn.Module):
    """A weight cut over ranks: along rows (``dim`` 0), each part by itself, or along columns."""

    def __init__(
        self,
        parts: Mapping[int | str, int],
        inputs: int,
        dim: int,
        config: LoadkitConfig,
        prefix: str,
        *,
        quantised: bool = True,
    ) -> None:
        super().__init__()
        parallel, quant = config.parallel_config, config.quant_config
        self.tp_rank, self.tp_size, self.dim = parallel.tp_rank, parallel.tp_size, dim
        divisor = self.tp_size if dim == 0 else 1
        found, offset = [], 0
        for index, (shard, rows) in enumerate(parts.items()):
            found.append(Part(shard, index, offset, rows // divisor))
            offset += rows // divisor
        self.output_shards = tuple(found)
        method = quant.get_quant_method(self, prefix) if quant and quantised else None
        self.quant_method: Any = method or PlainMethod()
        self.quant_method.create_weights(
            self,
            inputs // (self.tp_size if dim == 1 else 1),
            [part.size for part in found],
            inputs,
            sum(parts.values()),
            config.model_config.dtype,
            weight_loader=self.weight_loader,
            tp_rank=self.tp_rank,
            tp_size=self.tp_size,
        )

    def weight_loader(
        self, param: torch.Tensor, loaded_weight: torch.Tensor, shard_id: Any = None
    ) -> None:
        """Copy this rank's piece of a checkpoint tensor into its place."""
        place = param.data
        if shard_id is None and len(self.output_shards) > 1:  # fused in the checkpoint too
            pieces = [part.size * self.tp_size for part in self.output_shards]
            if loaded_weight.shape[:1] == (sum(pieces),):
                for part, piece in zip(
                    self.output_shards, loaded_weight.split(pieces), strict=True
                ):
                    self.weight_loader(param, piece, part.id)
                return
        elif shard_id is not None:
            part = next(part for part in self.output_shards if part.id == shard_id)
            place = place.narrow(0, part.offset, part.size)
        length = place.shape[self.dim]
        if loaded_weight.dim() != 2 or loaded_weight.shape[self.dim] != length * self.tp_size:
            expected = list(place.shape)
            expected[self.dim] *= self.tp_size
            raise WeightLoadError(
                f"the checkpoint tensor is {list(loaded_weight.shape)}; the parameter takes "
                f"{expected}"
            )
        mine = loaded_weight.narrow(self.dim, self.tp_rank * length, length)
        default_weight_loader(place, mine)


class Norm(nn.Module):
    """A weight [D] that every rank holds."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)


class Layer(nn.Module):
    """The weights of one layer."""

    def __init__(self, config: LoadkitConfig, prefix: str) -> None:
        super().__init__()
        hf, dtype = config.model_config.hf_config, config.model_config.dtype
        D, H, K, F = (
            hf.hidden_size,
            hf.num_attention_heads,
            hf.num_key_value_heads,
            hf.intermediate_size,
        )
        size = D // H
        q, kv = H * size, K * size
        self.input_layernorm = Norm(D, dtype)
        self.post_attention_layernorm = Norm(D, dtype)
        self.self_attn = nn.Module()
        attention = f"{prefix}.self_attn"
        self.self_attn.qkv_proj = Cut(
            {"q": q, "k": kv, "v": kv}, D, 0, config, f"{attention}.qkv_proj"
        )
        self.self_attn.o_proj = Cut({0: D}, q, 1, config, f"{attention}.o_proj")
        self.mlp = nn.Module()
        self.mlp.gate_up_proj = Cut({0: F, 1: F}, D, 0, config, f"{prefix}.mlp.gate_up_proj")
        self.mlp.down_proj = Cut({0: D}, F, 1, config, f"{prefix}.mlp.down_proj")


class ContractModel(nn.Module):
    """The model that contract checkpoints are of."""

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    hf_to_loadkit_mapper = WeightsMapper(
        orig_to_new_stacked={
            "q_proj": ("qkv_proj", "q"),
            "k_proj": ("qkv_proj", "k"),
            "v_proj": ("qkv_proj", "v"),
            "gate_proj": ("gate_up_proj", 0),
            "up_proj": ("gate_up_proj", 1),
        }
    )

    def __init__(self, *, config: LoadkitConfig, prefix: str = "") -> None:
        super().__init__()
        hf, dtype = config.model_config.hf_config, config.model_config.dtype
        V, D = hf.vocab_size, hf.hidden_size
        self.model = nn.Module()
        self.model.embed_tokens = Cut({0: V}, D, 0, config, "model.embed_tokens", quantised=False)
        self.model.layers = nn.ModuleList(
            Layer(config, f"model.layers.{number}") for number in range(hf.num_hidden_layers)
        )
        self.model.norm = Norm(D, dtype)
        self.lm_head = Cut({0: V}, D, 0, config, "lm_head", quantised=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Place every tensor."""
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_loadkit_mapper)


def joined(ranks: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """The checkpoint that the ranks of a ``ContractModel`` hold together, in rank order.

    Raises:
        ValueError: a weight that every rank holds whole is not the same on all.
    """
    back = ContractModel.hf_to_loadkit_mapper.reverse()
    found: dict[str, torch.Tensor] = {}
    every = [dict(rank.named_modules()) for rank in ranks]
    for path, first in every[0].items():
        modules = [modules[path] for modules in every]
        if isinstance(first, Norm):
            weights = [module.weight for module in modules if isinstance(module, Norm)]
            if not all(torch.equal(weights[0], weight) for weight in weights[1:]):
                raise ValueError(f"{path}.weight is not the same on all ranks")
            found[f"{path}.weight"] = weights[0].data
        elif isinstance(first, Cut):
            for part in first.output_shards:
                pieces = [_rows(module, part) for module in modules]
                alone = len(first.output_shards) == 1
                name = back.map_name(f"{path}.weight", None if alone else part.id)
                found[name or f"{path}.weight"] = torch.cat(pieces, first.dim)
    return found


def _rows(module: nn.Module, part: Part) -> torch.Tensor:
    weight: Any = module.weight
    rows: torch.Tensor = weight.data.narrow(0, part.offset, part.size)
    return rows
