"""``GGUFParameter``: the packed rows of one or several tensors in one parameter.

N rows of a tensor, K its columns, R tp size. Rows are bytes as the file has them; what is cut is
rows (column-parallel) or whole blocks of each row (row-parallel).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from loadkit.errors import WeightLoadError
from loadkit.text import printable
from loadkit.tracing.encoded import encoding_of, packed
from loadkit.tracing.lazy_tensor import LazyTensor, leaf_names
from loadkit_gguf.packed_rows import row_unit
from loadkit_layers.parameter import BaseParameter
from loadkit_layers.sharding import Shard, misfit

__all__ = ["GGUFParameter", "PackedPiece"]


@dataclass(frozen=True, slots=True)
class PackedPiece:
    """One shard's rows in a parameter, and which part of the checkpoint's tensor they are.

    Attributes:
        tensor: the tensor's name in the file.
        kind: its ggml type.
        offset: of the first row in the parameter; bytes.
        rows: the rank's rows.
        columns: elements of each of them.
        first_row, source_rows: where they begin in the shard's tensor, and how many rows that has.
        first_column, source_columns: the same along K; elements, on block borders.
    """

    tensor: str
    kind: str
    offset: int
    rows: int
    columns: int
    first_row: int
    source_rows: int
    first_column: int
    source_columns: int

    def in_bytes(self, columns: int) -> int:
        """The bytes of so many elements of a row."""
        block, size = row_unit(self.kind) or (1, 1)
        return columns // block * size

    @property
    def row_bytes(self) -> int:
        """Bytes of one of the rank's rows."""
        return self.in_bytes(self.columns)

    @property
    def nbytes(self) -> int:
        """Bytes of all of the rank's rows."""
        return self.rows * self.row_bytes


class GGUFParameter(BaseParameter):
    """uint8 [bytes]: the rows of every shard one after another, each shard of its own type.

    Args:
        data: the storage.
        pieces: what lies where, by the shard's index.
        dtype: of the numbers that an embedding gives.
        padding: rows after the last that exist for the layer and not in memory; zeros.
        **base: as ``BaseParameter``.
    """

    pieces: tuple[PackedPiece, ...]
    numbers: torch.dtype
    padding: int

    def __init__(
        self,
        data: torch.Tensor,
        *,
        pieces: Sequence[PackedPiece],
        dtype: torch.dtype,
        padding: int = 0,
        **base: Any,
    ) -> None:
        super().__init__(data, **base)
        self.pieces, self.numbers, self.padding = tuple(pieces), dtype, padding

    def rows_of(self, index: int) -> torch.Tensor:
        """The bytes of one shard: uint8 [rows, bytes of a row], a view."""
        piece = self.pieces[index]
        flat = self.data.narrow(0, piece.offset, piece.nbytes)
        return flat.view(piece.rows, piece.row_bytes)

    def runs(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Type and rows of neighbouring shards of one type: uint8 [rows, bytes of a row], views."""
        for kind, group in groupby(self.pieces, key=lambda piece: (piece.kind, piece.columns)):
            pieces = list(group)
            rows = sum(piece.rows for piece in pieces)
            flat = self.data.narrow(0, pieces[0].offset, rows * pieces[0].row_bytes)
            yield kind[0], flat.view(rows, pieces[0].row_bytes)

    def load_column_parallel_weight(self, loaded_weight: torch.Tensor) -> None:
        self._take(0, loaded_weight)

    def load_row_parallel_weight(self, loaded_weight: torch.Tensor) -> None:
        self._take(0, loaded_weight)

    def load_merged_column_weight(self, loaded_weight: torch.Tensor, *, shard: Shard) -> None:
        self._take(shard.index, loaded_weight)

    def split_fused(
        self, loaded_weight: torch.Tensor, shards: Sequence[Shard]
    ) -> Iterator[tuple[Shard, torch.Tensor]]:
        pieces = [self.pieces[shard.index] for shard in shards]
        rows = sum(piece.source_rows for piece in pieces)
        bytes_ = self._as_bytes(loaded_weight, pieces[0], rows)
        start = 0
        for shard, piece in zip(shards, pieces, strict=True):
            yield shard, bytes_.narrow(0, start, piece.source_rows)
            start += piece.source_rows

    def _take(self, index: int, loaded: torch.Tensor) -> None:
        """Copy the rank's part of a shard's tensor into its place."""
        piece = self.pieces[index]
        source = self._as_bytes(loaded, piece, piece.source_rows)
        source = source.narrow(0, piece.first_row, piece.rows)
        first = piece.in_bytes(piece.first_column)
        self.rows_of(index).copy_(source.narrow(1, first, piece.row_bytes))

    def _as_bytes(self, loaded: torch.Tensor, piece: PackedPiece, rows: int) -> torch.Tensor:
        """The tensor's bytes [rows, bytes of a row], checked to be of the piece's own type."""
        encoding = encoding_of(loaded)
        if encoding is not None and encoding.name == piece.kind:
            loaded = packed(loaded)  # a second tensor of the same blocks: a tied head's
        elif loaded.dtype != torch.uint8 or not _comes_from(loaded, piece.tensor):
            kind = encoding.name if encoding is not None else str(loaded.dtype)
            raise WeightLoadError(
                f"parameter {self.parameter_name} holds {piece.kind} blocks of "
                f"'{printable(piece.tensor)}'; what was given to it is {kind}, from elsewhere",
                parameter=self.parameter_name or None,
                hint="load without quantization='gguf': then numbers are decoded",
            )
        expected = [rows, piece.in_bytes(piece.source_columns)]
        if list(loaded.shape) != expected:
            raise misfit(self, loaded, expected, what=f"{piece.kind} rows in bytes")
        return loaded


def _comes_from(loaded: torch.Tensor, tensor: str) -> bool:
    """Whether lazy bytes are those of a tensor of the file; bytes in memory do not say."""
    return not isinstance(loaded, LazyTensor) or leaf_names(loaded.lazy_value()) == {tensor}
