"""``quantization="gguf"``: weights stay in blocks, as the file has them, and are decoded when used.

N output rows, K input columns, T tokens, D model width, R tp size. A weight [N, K] of Q4_K takes
0.56 bytes an element; a forward decodes it piece by piece, to the dtype of what it is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from loadkit.errors import ConfigFileError, ModelError, OptionError
from loadkit.file_checks import show
from loadkit.quantization import LinearMethodBase, QuantizationConfig
from loadkit_gguf.packed_parameter import GGUFParameter, PackedPiece
from loadkit_gguf.packed_rows import decode_rows, row_unit
from loadkit_gguf.packed_table import PackedTable, StoredTensor
from loadkit_layers import misaligned
from loadkit_layers.linear import LinearBase
from loadkit_layers.sharding import Shard
from loadkit_layers.unquantized import UnquantizedLinearMethod
from loadkit_layers.vocab_parallel_embedding import VocabParallelEmbedding

__all__ = ["GGUFConfig", "GGUFLinearMethod", "packed_tensors", "report_misaligned"]

STEP = 1 << 23  # elements of a weight that are decoded at a time: 32 MiB of float32

_MISALIGNED = "gguf_misaligned"  # the attribute of a layer whose part begins inside a block


class Misaligned(NamedTuple):
    """A tensor whose K columns cannot be cut over tp ranks on block borders."""

    tensor: str
    kind: str
    block: int
    columns: int
    parameter: str
    tp_size: int

    @property
    def cut(self) -> str:
        """What of it is cut."""
        return f"{self.columns} columns"

    def fits(self, tp: int) -> bool:
        """Whether tp ranks cut it on block borders."""
        return self.columns % (tp * self.block) == 0


class GGUFConfig(QuantizationConfig):
    """Which weights of a model stay packed: made by the GGUF loader, from the file's own types.

    Args:
        table: the tensors that may stay packed.
        misaligned: "error", or "decode" for layers that tp cuts inside a block.
    """

    def __init__(self, table: PackedTable, *, misaligned: str = "error") -> None:
        super().__init__()
        self.table = table
        self.misaligned = misaligned

    @classmethod
    def get_name(cls) -> str:
        return "gguf"

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def get_config_filenames(cls) -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> GGUFConfig:
        """Refuse: which weights are stored how is in a GGUF file's header, and nowhere else.

        Raises:
            OptionError: always.
        """
        raise OptionError(
            "quantization='gguf' keeps the blocks of a GGUF file, and this checkpoint is none",
            hint="give the .gguf file, or leave quantization out",
        )

    def to_saved(self) -> dict[str, Any]:
        return {"misaligned": self.misaligned, "tensors": self.table.to_list()}

    @classmethod
    def from_saved(cls, values: Mapping[str, Any]) -> GGUFConfig:
        """The config that ``to_saved`` described.

        Raises:
            ConfigFileError: it is none.
        """
        misaligned = values.get("misaligned")
        if misaligned not in ("error", "decode"):
            raise ConfigFileError(f"misaligned is {show(misaligned)}: 'error' or 'decode'")
        return cls(PackedTable.from_list(values.get("tensors")), misaligned=misaligned)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> GGUFLinearMethod | None:
        """A method for every layer that cuts a matrix; it decides once it knows the sizes."""
        if isinstance(layer, (LinearBase, VocabParallelEmbedding)):
            return GGUFLinearMethod(self, prefix)
        return None


class GGUFLinearMethod(LinearMethodBase):
    """Packed rows in one parameter ``weight``; y = x W^T + b with W decoded piece by piece.

    A layer none of whose tensors are blocks, or whose sizes are not the file's, becomes a plain
    one: its numbers are decoded as they land, and sizes that do not fit are told as always.
    """

    def __init__(self, config: GGUFConfig, prefix: str) -> None:
        self.config, self.prefix = config, prefix

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
        K = input_size_per_partition, input_size
        if isinstance(layer, VocabParallelEmbedding):
            pieces, padding = self._table_rows(layer), layer.num_embeddings_per_partition
        elif isinstance(layer, LinearBase):
            pieces, padding = self._shards(layer, *K), sum(output_partition_sizes)
        else:
            pieces, padding = None, 0
        if pieces is not None:
            data = torch.empty(sum(piece.nbytes for piece in pieces), dtype=torch.uint8)
            weight = GGUFParameter(
                data,
                pieces=pieces,
                dtype=params_dtype,
                padding=padding - sum(piece.rows for piece in pieces),
                **extra_weight_attrs,
            )
            layer.register_parameter("weight", weight)
            return
        plain = UnquantizedLinearMethod()
        layer.quant_method = plain  # type: ignore[assignment]  # a layer's own attribute
        plain.create_weights(
            layer, K[0], output_partition_sizes, K[1], output_size, params_dtype,
            **extra_weight_attrs,
        )  # fmt: skip

    def _table_rows(self, layer: VocabParallelEmbedding) -> list[PackedPiece] | None:
        """The rank's rows of a vocabulary, without its padding."""
        tensor = self.config.table.whole(self.prefix)
        if tensor is None:
            return None
        rows, columns = tensor.shape
        if rows not in (layer.num_embeddings, layer.org_vocab_size):
            return None
        if columns != layer.embedding_dim:
            return None
        first = min(layer.vocab_start_index, rows)
        own = min(layer.vocab_end_index, rows) - first
        return [PackedPiece(*tensor[:2], 0, own, columns, first, rows, 0, columns)]

    def _shards(self, layer: LinearBase, own: int, K: int) -> list[PackedPiece] | None:
        """The rank's part of every shard: of ``own`` columns of ``K``."""
        shards = layer.output_shards
        found = self.config.table.shards(self.prefix, shards, self.config.packed_modules_mapping)
        if found is None or not _sizes_fit(found, shards, layer.tp_size, K):
            return None
        pieces: list[PackedPiece] = []
        bad: list[Misaligned] = []
        offset = 0
        for shard, (name, kind, _) in zip(shards, found, strict=True):
            block = (row_unit(kind) or (1, 1))[0]
            if own % block:
                parameter = f"{self.prefix}.weight"
                bad.append(Misaligned(name, kind, block, K, parameter, layer.tp_size))
                continue
            piece = PackedPiece(
                tensor=name,
                kind=kind,
                offset=offset,
                rows=shard.size,
                columns=own,
                first_row=shard.piece(layer.tp_rank) * shard.size,
                source_rows=shard.size * shard.pieces(layer.tp_size),
                first_column=layer.tp_rank * own if own != K else 0,
                source_columns=K,
            )
            offset += piece.nbytes
            pieces.append(piece)
        if bad and self.config.misaligned != "decode":
            setattr(layer, _MISALIGNED, tuple(bad))
        return None if bad else pieces

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        weight = _weight_of(layer)
        parts, at = [], 0
        for numbers in _decoded(weight, x.dtype):
            rows = numbers.shape[0]
            parts.append(F.linear(x, numbers, None if bias is None else bias[at : at + rows]))
            at += rows
        if weight.padding:
            parts.append(x.new_zeros((*x.shape[:-1], weight.padding)))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def embedding(self, layer: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
        """Ids [T] to vectors [T, D]: only the rows that are looked up are decoded.

        A padding row is a vector of zeros.
        """
        weight = _weight_of(layer)
        piece, rows = weight.pieces[0], weight.rows_of(0)
        ids = input_ids.reshape(-1).long()
        padding = (ids >= piece.rows) & (ids < piece.rows + weight.padding)
        if not piece.rows:
            made = torch.zeros(len(ids), piece.columns, dtype=weight.numbers, device=rows.device)
        else:
            looked_up = rows.index_select(0, ids.masked_fill(padding, 0))
            made = decode_rows(piece.kind, looked_up, weight.numbers)
        if weight.padding:
            made = made.masked_fill(padding.unsqueeze(-1), 0)
        return made.view(*input_ids.shape, piece.columns)


def _weight_of(layer: nn.Module) -> GGUFParameter:
    weight = layer.weight
    if not isinstance(weight, GGUFParameter):
        raise ModelError(f"the weight of {type(layer).__name__} is {type(weight).__name__} now")
    return weight


def _decoded(weight: GGUFParameter, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """The weight's rows in order, [n, K] at a time."""
    columns = max(1, weight.pieces[0].columns)
    for kind, packed in weight.runs():
        for rows in packed.split(max(1, STEP // columns)):
            if rows.shape[0]:
                yield decode_rows(kind, rows, dtype)


def _sizes_fit(
    found: Sequence[StoredTensor], shards: Sequence[Shard], tp_size: int, K: int
) -> bool:
    """Whether the file's tensors have the shapes that the shards are cut from."""
    rows: dict[str, int] = {}
    for shard, tensor in zip(shards, found, strict=True):
        rows[tensor.name] = rows.get(tensor.name, 0) + shard.size * shard.pieces(tp_size)
    return all(tensor.shape == (rows[tensor.name], K) for tensor in found)


def packed_tensors(model: nn.Module) -> set[str]:
    """The file's names of the tensors that a model's parameters take packed."""
    return {
        piece.tensor
        for param in model.parameters()
        if isinstance(param, GGUFParameter)
        for piece in param.pieces
    }


def report_misaligned(model: nn.Module, hf_config: Any) -> None:
    """Tell the plan of every tensor that tp cuts inside a block.

    Raises:
        ModelError: GGUF_MISALIGNED, where no plan is under way.
    """
    bad: list[Misaligned] = [
        one for module in model.modules() for one in getattr(module, _MISALIGNED, ())
    ]
    misaligned.report_misaligned(
        bad, hf_config, code="GGUF_MISALIGNED", opt_out="LoadConfig(gguf_misaligned='decode')"
    )
