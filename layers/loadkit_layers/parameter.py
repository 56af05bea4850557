"""Parameters that know how to take their part of a checkpoint tensor.

One class per way a tensor lies over a weight [N, K] (N output rows, K input columns, R tp size).
The four ``load_*`` methods are what linear layers call; each is views and one copy, checked first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any, Self

import torch

from loadkit.errors import WeightLoadError
from loadkit_layers.sharding import Cut, Shard, copy_cut, misfit

__all__ = [
    "BaseParameter",
    "ChannelQuantScaleParameter",
    "ColumnParameter",
    "GroupQuantScaleParameter",
    "ModelWeightParameter",
    "PackedParameter",
    "PerTensorScaleParameter",
    "RowParameter",
    "as_sharded",
]


class BaseParameter(torch.nn.Parameter):
    """A parameter that every rank holds whole; the others cut it.

    Args:
        data: the storage; kept, not copied. Any dtype and device.
        tp_rank: which of ``tp_size`` ranks holds it. No default: a forgotten rank is a TypeError.
        tp_size: how many ranks share the layer.
        weight_loader: called as ``weight_loader(param, loaded_weight[, shard_id])``.
        parameter_name: the dotted name, for errors; layers fill it in.
    """

    tp_rank: int
    tp_size: int
    weight_loader: Callable[..., None]
    parameter_name: str

    def __new__(cls, data: torch.Tensor, **_: Any) -> Self:
        return super().__new__(cls, data, requires_grad=False)

    def __init__(
        self,
        data: torch.Tensor,
        *,
        tp_rank: int,
        tp_size: int,
        weight_loader: Callable[..., None] | None = None,
        parameter_name: str = "",
    ) -> None:
        self.tp_rank, self.tp_size, self.parameter_name = tp_rank, tp_size, parameter_name
        if weight_loader is not None:
            self.weight_loader = weight_loader

    def load_column_parallel_weight(self, loaded_weight: torch.Tensor) -> None:
        """Take this rank's part of a column-parallel layer's tensor."""
        self.copy_part(loaded_weight)

    def load_row_parallel_weight(self, loaded_weight: torch.Tensor) -> None:
        """Take this rank's part of a row-parallel layer's tensor."""
        self.copy_part(loaded_weight)

    def load_merged_column_weight(self, loaded_weight: torch.Tensor, *, shard: Shard) -> None:
        """Take this rank's part of one shard's tensor, into that shard's place."""
        self.copy_part(loaded_weight)

    def load_qkv_weight(self, loaded_weight: torch.Tensor, *, shard: Shard) -> None:
        """As ``load_merged_column_weight``; k and v may be replicated over ranks."""
        self.load_merged_column_weight(loaded_weight, shard=shard)

    def split_fused(
        self, loaded_weight: torch.Tensor, shards: Sequence[Shard]
    ) -> Iterator[tuple[Shard, torch.Tensor]]:
        """Views of a tensor that holds several shards already fused, one per shard."""
        yield shards[0], loaded_weight

    def copy_part(self, loaded_weight: torch.Tensor, *cuts: Cut, what: str = "") -> None:
        """The copy all methods end in; a subclass may check the dtype first."""
        copy_cut(self, loaded_weight, *cuts, what=what)

    def __deepcopy__(self, memo: dict[int, Any]) -> BaseParameter:
        if id(self) not in memo:
            data = self.data.clone(memory_format=torch.preserve_format)
            memo[id(self)] = twin = torch.Tensor._make_subclass(type(self), data, False)
            twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        found: BaseParameter = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        state = dict(self.__dict__)
        return _rebuild, (type(self), self.data), state, None, None, _restore


def _rebuild(cls: type[BaseParameter], data: torch.Tensor) -> torch.Tensor:
    """Unpickle: the class and the data; attributes follow."""
    return torch.Tensor._make_subclass(cls, data, False)


def _restore(param: BaseParameter, state: dict[str, Any]) -> None:
    """Unpickle: the attributes, the weight loader (and so its layer) among them."""
    param.__dict__.update(state)


class ColumnParameter(BaseParameter):
    """Cut along ``output_dim``: a bias [N], or anything with one entry per output row."""

    output_dim: int

    def __init__(self, data: torch.Tensor, *, output_dim: int, **base: Any) -> None:
        super().__init__(data, **base)
        self.output_dim = output_dim

    def output_units(self, rows: int) -> int:
        """How many entries of ``output_dim`` stand for this many rows of the unpacked weight."""
        return rows

    def output_offset(self, shard: Shard) -> int:
        """Where a shard starts in this parameter, in entries of ``output_dim``."""
        return self.output_units(shard.offset)

    def load_column_parallel_weight(self, loaded_weight: torch.Tensor) -> None:
        size = self.shape[self.output_dim]
        cut = Cut(self.output_dim, 0, size, self.tp_rank * size, self.tp_size * size)
        self.copy_part(loaded_weight, cut)

    def load_merged_column_weight(self, loaded_weight: torch.Tensor, *, shard: Shard) -> None:
        size = self.output_units(shard.size)
        piece, pieces = shard.piece(self.tp_rank), shard.pieces(self.tp_size)
        offset = self.output_offset(shard)
        cut = Cut(self.output_dim, offset, size, piece * size, pieces * size)
        self.copy_part(loaded_weight, cut, what=f"shard {shard.id!r}")

    def split_fused(
        self, loaded_weight: torch.Tensor, shards: Sequence[Shard]
    ) -> Iterator[tuple[Shard, torch.Tensor]]:
        sizes = [self.output_units(shard.size * shard.pieces(self.tp_size)) for shard in shards]
        expected = list(self.shape)
        expected[self.output_dim] = sum(sizes)
        what = f"shards {[shard.id for shard in shards]} fused"
        if list(loaded_weight.shape) != expected:
            raise misfit(self, loaded_weight, expected, what=what)
        start = 0
        for shard, size in zip(shards, sizes, strict=True):
            yield shard, loaded_weight.narrow(self.output_dim, start, size)
            start += size


class RowParameter(BaseParameter):
    """Cut along ``input_dim`` in row-parallel layers, whole in column-parallel ones."""

    input_dim: int

    def __init__(self, data: torch.Tensor, *, input_dim: int, **base: Any) -> None:
        super().__init__(data, **base)
        self.input_dim = input_dim

    def load_row_parallel_weight(self, loaded_weight: torch.Tensor) -> None:
        size = self.shape[self.input_dim]
        cut = Cut(self.input_dim, 0, size, self.tp_rank * size, self.tp_size * size)
        self.copy_part(loaded_weight, cut)


class GroupQuantScaleParameter(ColumnParameter, RowParameter):
    """One scale (or zero point) per output row and group of input columns: [N, K / group]."""


class ChannelQuantScaleParameter(ColumnParameter):
    """One scale per output row: [N] or [N, 1]; whole in row-parallel layers."""


class ModelWeightParameter(ColumnParameter, RowParameter):
    """A weight [N, K] of plain numbers.

    A float checkpoint may be cast to the parameter's float dtype. Between floats, 8-bit floats,
    integers and bools nothing is converted: such numbers mean nothing without their scales.
    """

    def copy_part(self, loaded_weight: torch.Tensor, *cuts: Cut, what: str = "") -> None:
        ours, theirs = _kind(self.dtype), _kind(loaded_weight.dtype)
        if ours != theirs:
            raise _wrong_dtype(self, loaded_weight)
        super().copy_part(loaded_weight, *cuts, what=what)


class PackedParameter(ModelWeightParameter):
    """A weight with ``packed_factor`` elements in each entry along ``packed_dim``.

    The factor may be a Fraction (3-bit values in 32-bit words: 32/3).

    Raises:
        WeightLoadError: at load, where a shard's border falls inside an entry.
    """

    packed_dim: int
    packed_factor: int | Fraction

    def __init__(
        self,
        data: torch.Tensor,
        *,
        packed_dim: int,
        packed_factor: int | Fraction,
        **dims: Any,
    ) -> None:
        super().__init__(data, **dims)
        self.packed_dim, self.packed_factor = packed_dim, packed_factor

    def output_units(self, rows: int) -> int:
        if self.packed_dim != self.output_dim:
            return rows
        units = Fraction(rows) / self.packed_factor
        if units.denominator != 1:
            raise WeightLoadError(
                f"parameter {self.parameter_name}: {rows} rows do not fill whole packed entries "
                f"of {self.packed_factor}",
                parameter=self.parameter_name or None,
                detail={"rows": rows, "packed_factor": str(self.packed_factor)},
                hint="use a tp size that splits on entry borders",
            )
        return int(units)

    def copy_part(self, loaded_weight: torch.Tensor, *cuts: Cut, what: str = "") -> None:
        if self.dtype != loaded_weight.dtype:
            raise _wrong_dtype(self, loaded_weight)
        super().copy_part(loaded_weight, *cuts, what=what)


class PerTensorScaleParameter(BaseParameter):
    """One scale per fused shard: [], [1] or [n]; a checkpoint may say [], [1] or [1, 1]."""

    def load_merged_column_weight(self, loaded_weight: torch.Tensor, *, shard: Shard) -> None:
        if loaded_weight.numel() != 1 or shard.index >= self.numel():
            raise misfit(self, loaded_weight, "one element", what=f"shard {shard.id!r}")
        self.data.view(-1).narrow(0, shard.index, 1).copy_(loaded_weight.view(1))

    def split_fused(
        self, loaded_weight: torch.Tensor, shards: Sequence[Shard]
    ) -> Iterator[tuple[Shard, torch.Tensor]]:
        count = loaded_weight.numel()
        if count == 1:  # one scale for the fused tensor is the scale of each of its shards
            yield from ((shard, loaded_weight) for shard in shards)
        elif list(loaded_weight.shape) == [len(shards)]:
            yield from ((s, loaded_weight.narrow(0, i, 1)) for i, s in enumerate(shards))
        else:
            raise misfit(self, loaded_weight, f"1 or [{len(shards)}] elements", what="fused shards")


def as_sharded(param: torch.Tensor, *, tp_rank: int, tp_size: int) -> BaseParameter:
    """The parameter itself, or, for a plain one with vLLM's attributes, a twin on its storage.

    ``output_dim``, ``input_dim``, ``packed_dim`` with ``packed_factor`` (or ``pack_factor``) and
    ``needs_scalar_to_array`` are understood.
    """
    if isinstance(param, BaseParameter):
        return param
    base: dict[str, Any] = {
        "tp_rank": tp_rank,
        "tp_size": tp_size,
        "parameter_name": getattr(param, "parameter_name", ""),
    }
    output_dim, input_dim = getattr(param, "output_dim", None), getattr(param, "input_dim", None)
    packed_dim = getattr(param, "packed_dim", None)
    if getattr(param, "needs_scalar_to_array", False):
        return PerTensorScaleParameter(param.data, **base)
    if output_dim is not None and input_dim is not None:
        dims = {"output_dim": output_dim, "input_dim": input_dim, **base}
        if packed_dim is None:
            return GroupQuantScaleParameter(param.data, **dims)
        factor: Any = getattr(param, "packed_factor", None) or getattr(param, "pack_factor", 1)
        return PackedParameter(param.data, packed_dim=packed_dim, packed_factor=factor, **dims)
    if output_dim is not None:
        return ColumnParameter(param.data, output_dim=output_dim, **base)
    if input_dim is not None:
        return RowParameter(param.data, input_dim=input_dim, **base)
    return BaseParameter(param.data, **base)


def _kind(dtype: torch.dtype) -> str:
    """Which numbers may be cast into one another: "float", "int", or a dtype by itself."""
    if dtype.is_complex or dtype == torch.bool or (dtype.is_floating_point and dtype.itemsize < 2):
        return str(dtype)
    return "float" if dtype.is_floating_point else "int"


def _wrong_dtype(param: BaseParameter, loaded: torch.Tensor) -> WeightLoadError:
    """The error of a tensor whose numbers are not the parameter's kind of numbers."""
    return WeightLoadError(
        f"the checkpoint tensor is {loaded.dtype}; parameter {param.parameter_name} is "
        f"{param.dtype}, and one is not cast to the other",
        parameter=param.parameter_name or None,
        detail={"checkpoint_dtype": str(loaded.dtype), "parameter_dtype": str(param.dtype)},
        hint="a quantised checkpoint needs its quantization_config, or quantization=...",
    )
