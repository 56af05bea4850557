"""A rank's part of a 4-bit matrix: which elements it is, and where they lie in a layer.

N rows, K columns of the matrix; elements are row-major. A part is whole rows (column-parallel
layers) or some columns of every row (row-parallel ones), cut on borders of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loadkit_bitsandbytes.scheme import Scheme

__all__ = ["Cutout", "Piece", "Places"]


@dataclass(frozen=True, slots=True)
class Cutout:
    """What of a checkpoint's tensor goes where, in the tensor's own entries.

    The tensor is looked at as a matrix ``source``; the part of ``size`` that begins at ``first``
    fills the parameter from ``at`` on, row by row.
    """

    tensor: str
    at: int
    source: tuple[int, int]
    first: tuple[int, int]
    size: tuple[int, int]

    @property
    def count(self) -> int:
        """Entries that it fills."""
        return self.size[0] * self.size[1]


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one matrix that one shard of a layer is.

    Attributes:
        tensor: the matrix's name in the checkpoint; "" where it is quantised here.
        scheme: how it is quantised.
        rows, columns: of the part.
        first_row, source_rows: where it begins in the matrix, and how many rows that has.
        first_column, source_columns: the same along K.
        offset: what is added to nested scales.
    """

    tensor: str
    scheme: Scheme
    rows: int
    columns: int
    first_row: int
    source_rows: int
    first_column: int
    source_columns: int
    offset: float = 0.0

    @classmethod
    def whole(cls, scheme: Scheme, rows: int, columns: int) -> Piece:
        """All of a matrix that is quantised here."""
        return cls("", scheme, rows, columns, 0, rows, 0, columns)

    @property
    def numel(self) -> int:
        """Elements."""
        return self.rows * self.columns

    @property
    def nbytes(self) -> int:
        """Bytes of its codes."""
        return (self.numel + 1) // 2

    @property
    def blocks(self) -> int:
        """Scales."""
        return self.scheme.blocks(self.numel)

    @property
    def cuts_columns(self) -> bool:
        """Whether it is some columns of each row."""
        return self.columns != self.source_columns

    @property
    def is_whole(self) -> bool:
        """Whether it is the matrix."""
        return self.rows == self.source_rows and not self.cuts_columns

    @property
    def first_block(self) -> int:
        """Which block of the matrix is its first."""
        start = self.first_row * self.source_columns + self.first_column
        return start // self.scheme.blocksize

    @property
    def fits(self) -> bool:
        """Whether its borders are borders of blocks."""
        size = self.scheme.blocksize
        if self.cuts_columns:
            return not (
                self.source_columns % size or self.first_column % size or self.columns % size
            )
        start = self.first_row * self.source_columns
        ends = self.first_row + self.rows == self.source_rows or self.numel % size == 0
        return start % size == 0 and ends

    @property
    def nested_span(self) -> tuple[int, int]:
        """First and number of the nested scales that its blocks have; (0, 0) without any."""
        group = self.scheme.nested
        if not group or not self.blocks:
            return 0, 0
        last = self.first_block + self.blocks - 1
        if self.cuts_columns:
            size = self.scheme.blocksize
            step, own = self.source_columns // size, self.columns // size
            last = self.first_block + (self.rows - 1) * step + own - 1
        first = self.first_block // group
        return first, last // group - first + 1

    @property
    def in_order(self) -> bool:
        """Whether its scales are nested as if it were a matrix of its own."""
        group = self.scheme.nested
        return not group or (not self.cuts_columns and self.first_block % group == 0)

    def nested_ids(self, device: torch.device) -> torch.Tensor:
        """For each of its blocks, the place of the nested scale in ``nested_span``: [blocks]."""
        size = self.scheme.blocksize
        if self.cuts_columns:
            step, own = self.source_columns // size, self.columns // size
            rows = torch.arange(self.rows, device=device).unsqueeze(1) * step
            ids = (rows + torch.arange(own, device=device)).view(-1) + self.first_block
        else:
            ids = torch.arange(self.blocks, device=device) + self.first_block
        return ids // self.scheme.nested - self.nested_span[0]

    def cut(self, role: str, at: int) -> Cutout:
        """What it takes of the tensor that is this of its matrix.

        Args:
            role: "weight", "absmax", "nested_absmax", "quant_map" or "nested_quant_map".
            at: where that goes, in entries of the parameter.
        """
        if role in ("quant_map", "nested_quant_map"):
            count = 16 if role == "quant_map" else 256
            return Cutout(self.tensor, at, (1, count), (0, 0), (1, count))
        total = self.source_rows * self.source_columns
        if role == "nested_absmax":
            start, count = self.nested_span
            entries = -(-self.scheme.blocks(total) // self.scheme.nested)
            return Cutout(self.tensor, at, (1, entries), (0, start), (1, count))
        unit = 2 if role == "weight" else self.scheme.blocksize  # elements of an entry
        if self.cuts_columns:
            source = self.source_rows, self.source_columns // unit
            first = self.first_row, self.first_column // unit
            return Cutout(self.tensor, at, source, first, (self.rows, self.columns // unit))
        start = self.first_row * self.source_columns // unit
        return Cutout(
            self.tensor, at, (1, -(-total // unit)), (0, start), (1, -(-self.numel // unit))
        )


@dataclass(frozen=True, slots=True)
class Places:
    """Where a piece begins in a layer's parameters, in their entries."""

    row: int
    weight: int
    absmax: int
    nested_absmax: int

    @staticmethod
    def of(pieces: Sequence[Piece]) -> list[Places]:
        """The places of pieces one after another; one more at the end: the sizes of all."""
        places = [Places(0, 0, 0, 0)]
        for piece in pieces:
            last = places[-1]
            places.append(
                Places(
                    last.row + piece.rows,
                    last.weight + piece.nbytes,
                    last.absmax + piece.blocks,
                    last.nested_absmax + piece.nested_span[1],
                )
            )
        return places
