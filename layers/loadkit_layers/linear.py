"""Linear layers over R tensor-parallel ranks: replicated, column- and row-parallel.

T tokens, K input features, N output features, R tp size. A layer makes its parameters through its
quantisation method; each parameter knows its part of the checkpoint (``parameter.py``), and the
layer's ``weight_loader`` only says which of the parameter's four loads it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from loadkit.config import ParallelConfig
from loadkit.quantization import QuantizationConfig, QuantizeMethodBase
from loadkit.tracing.regions import copies_regions
from loadkit_layers.communication import all_gather, all_reduce
from loadkit_layers.parameter import BaseParameter, ColumnParameter, as_sharded
from loadkit_layers.sharding import Shard, require_divisible, split_shards
from loadkit_layers.unquantized import UnquantizedLinearMethod

__all__ = [
    "LOOKED_AT",
    "ColumnParallelLinear",
    "LinearBase",
    "ReplicatedLinear",
    "RowParallelLinear",
]

LOOKED_AT = ("output_shards", "tp_rank", "tp_size")  # by weight loaders: tracing.known_copies

LinearOutput = torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]


class LinearBase(torch.nn.Module):
    """What all linear layers share.

    Args:
        input_size: K, over all ranks.
        output_size: N, over all ranks.
        parallel: this rank's place; no default.
        skip_bias_add: return the bias beside the output and do not add it.
        params_dtype: the parameters' dtype; None: torch's default dtype.
        quant_config: where the layer's method comes from; None: plain weights.
        prefix: the layer's dotted name, for quantisation and errors.
        return_bias: return ``(output, bias or None)``; False: the output alone.
        disable_tp: hold the whole layer on every rank.

    Attributes:
        tp_rank: this rank's number among the ranks that cut the layer.
        tp_size: how many ranks cut the layer.
        output_shards: the fused parts of the output, as this rank sees them.
        quant_method: what makes, applies and post-processes the weights.
    """

    output_shards: tuple[Shard, ...]
    input_size_per_partition: int
    bias: torch.Tensor | None

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        parallel: ParallelConfig,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        return_bias: bool = True,
        disable_tp: bool = False,
    ) -> None:
        super().__init__()
        self.input_size, self.output_size = input_size, output_size
        self.parallel = parallel
        self.tp_size = 1 if disable_tp else parallel.tp_size
        self.tp_rank = 0 if disable_tp else parallel.tp_rank
        self.skip_bias_add, self.return_bias = skip_bias_add, return_bias
        self.params_dtype = params_dtype or torch.get_default_dtype()
        self.quant_config, self.prefix = quant_config, prefix
        method = quant_config.get_quant_method(self, prefix) if quant_config else None
        self.quant_method: QuantizeMethodBase = method or UnquantizedLinearMethod()

    @property
    def output_partition_sizes(self) -> list[int]:
        """The rank's rows of each shard."""
        return [shard.size for shard in self.output_shards]

    @property
    def output_size_per_partition(self) -> int:
        """The rank's rows of all shards."""
        return sum(self.output_partition_sizes)

    def create_parameters(self, bias: bool) -> None:
        """Let the method make the weights, then make the bias; every parameter knows its rank."""
        attrs: dict[str, Any] = {
            "weight_loader": self.weight_loader,
            "tp_rank": self.tp_rank,
            "tp_size": self.tp_size,
        }
        self.quant_method.create_weights(
            self,
            self.input_size_per_partition,
            self.output_partition_sizes,
            self.input_size,
            self.output_size,
            self.params_dtype,
            **attrs,
        )
        self.register_parameter("bias", self.create_bias(attrs) if bias else None)
        for name, param in self._parameters.items():
            if param is None:
                continue
            setattr(param, "parameter_name", f"{self.prefix}.{name}" if self.prefix else name)  # noqa: B010

    def create_bias(self, attrs: dict[str, Any]) -> BaseParameter:
        """A bias cut like the output."""
        data = torch.empty(self.output_size_per_partition, dtype=self.params_dtype)
        return ColumnParameter(data, output_dim=0, **attrs)

    def sharded(self, param: torch.Tensor) -> BaseParameter:
        """The parameter with its loading methods; plain ones are given them."""
        return as_sharded(param, tp_rank=self.tp_rank, tp_size=self.tp_size)

    @copies_regions
    def weight_loader(self, param: torch.nn.Parameter, loaded_weight: torch.Tensor) -> None:
        """Copy this rank's part of a checkpoint tensor into one of the layer's parameters.

        Raises:
            WeightLoadError: the shapes do not fit; the parameter is untouched.
        """
        self.sharded(param).load_column_parallel_weight(loaded_weight)

    def output(self, y: torch.Tensor) -> LinearOutput:
        """The forward result, with or without the bias beside it."""
        if not self.return_bias:
            return y
        return y, self.bias if self.skip_bias_add else None

    def extra_repr(self) -> str:
        return (
            f"in={self.input_size_per_partition}, out={self.output_size_per_partition}, "
            f"bias={self.bias is not None}, tp_rank={self.tp_rank}, tp_size={self.tp_size}"
        )


class ReplicatedLinear(LinearBase):
    """Every rank holds the whole layer. Arguments as ``LinearBase``, ``bias`` third."""

    loader_looks_at = LOOKED_AT

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        *,
        parallel: ParallelConfig,
        **base: Any,
    ) -> None:
        super().__init__(input_size, output_size, parallel=parallel, **{**base, "disable_tp": True})
        self.output_shards = (Shard(0, 0, 0, output_size),)
        self.input_size_per_partition = input_size
        self.create_parameters(bias)

    def forward(self, x: torch.Tensor) -> LinearOutput:
        """Take x [..., K], give y [..., N]."""
        bias = None if self.skip_bias_add else self.bias
        return self.output(self.quant_method.apply(self, x, bias))


class ColumnParallelLinear(LinearBase):
    """Output features cut over the ranks: rank r holds rows r N/R to (r + 1) N/R.

    Args:
        input_size: K.
        output_size: N.
        bias: add a bias [N].
        parallel: this rank's place.
        gather_output: give every rank all N features, in the order of tp 1.
        shards: the fused parts of the output, if it is not one; for subclasses.
        **base: as ``LinearBase``.

    Raises:
        ModelError: ``TP_INDIVISIBLE``.
    """

    loader_looks_at = LOOKED_AT

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        *,
        parallel: ParallelConfig,
        gather_output: bool = False,
        shards: Sequence[Shard] | None = None,
        **base: Any,
    ) -> None:
        super().__init__(input_size, output_size, parallel=parallel, **base)
        whole = shards or split_shards([output_size], self.tp_size, prefix=self.prefix)
        self.output_shards = tuple(whole)
        self.input_size_per_partition = input_size
        self.gather_output = gather_output
        self.create_parameters(bias)

    def forward(self, x: torch.Tensor) -> LinearOutput:
        """Take x [..., K], give y [..., N/R], or [..., N] gathered."""
        y = self.quant_method.apply(self, x, None if self.skip_bias_add else self.bias)
        if self.gather_output and self.tp_size > 1:
            parts = y.split(self.output_partition_sizes, dim=-1)
            y = torch.cat([all_gather(part, self.parallel) for part in parts], dim=-1)
        return self.output(y)


class RowParallelLinear(LinearBase):
    """Input features cut over the ranks; the partial results are summed.

    Args:
        input_size: K.
        output_size: N.
        bias: add a bias [N], which every rank holds whole and one rank adds.
        parallel: this rank's place.
        input_is_parallel: x is [..., K/R] already; False: each rank takes its part of [..., K].
        reduce_results: sum over the ranks; False: the caller does.
        **base: as ``LinearBase``.

    Raises:
        ModelError: ``TP_INDIVISIBLE``.
    """

    loader_looks_at = LOOKED_AT

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        *,
        parallel: ParallelConfig,
        input_is_parallel: bool = True,
        reduce_results: bool = True,
        **base: Any,
    ) -> None:
        super().__init__(input_size, output_size, parallel=parallel, **base)
        require_divisible(self.prefix, self.tp_size, [input_size], unit="input size")
        self.output_shards = (Shard(0, 0, 0, output_size, replicas=self.tp_size),)
        self.input_size_per_partition = input_size // self.tp_size
        self.input_is_parallel, self.reduce_results = input_is_parallel, reduce_results
        self.create_parameters(bias)

    def create_bias(self, attrs: dict[str, Any]) -> BaseParameter:
        return BaseParameter(torch.empty(self.output_size, dtype=self.params_dtype), **attrs)

    @copies_regions
    def weight_loader(self, param: torch.nn.Parameter, loaded_weight: torch.Tensor) -> None:
        self.sharded(param).load_row_parallel_weight(loaded_weight)

    def forward(self, x: torch.Tensor) -> LinearOutput:
        """Take x [..., K/R] (or [..., K]), give y [..., N]."""
        if not self.input_is_parallel and self.tp_size > 1:
            size = self.input_size_per_partition
            x = x.narrow(-1, self.tp_rank * size, size)
        adds_bias = self.tp_rank == 0 and not self.skip_bias_add
        y = self.quant_method.apply(self, x, self.bias if adds_bias else None)
        if self.reduce_results and self.tp_size > 1:
            y = all_reduce(y, self.parallel)
        return self.output(y)
