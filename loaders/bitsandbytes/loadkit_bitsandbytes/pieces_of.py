"""The pieces that a layer's shards are, and the parameters that hold them.

N output rows, K input columns, R tp size. Parameters are flat: ``weight`` the codes, two in a byte,
``weight_absmax`` the scales, with nested scales ``weight_nested_absmax``,
``weight_nested_quant_map`` and ``weight_nested_offset``; ``weight_quant_map`` is the file's code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from loadkit_bitsandbytes.arithmetic import Quantised
from loadkit_bitsandbytes.packed_parameter import PackedParameter4bit
from loadkit_bitsandbytes.piece import Piece, Places
from loadkit_bitsandbytes.survey import StoredMatrix
from loadkit_layers.linear import LinearBase
from loadkit_layers.sharding import Shard
from loadkit_layers.vocab_parallel_embedding import VocabParallelEmbedding

__all__ = ["LayerShards", "create_packed", "merged", "parts_of", "pieces_of", "shards_of"]


class LayerShards(NamedTuple):
    """What a linear layer's weight is made of, on one rank.

    Attributes:
        shards: its fused parts.
        first_rows: where each begins in its own matrix, before anything is fused on disk.
        total_rows: the rows of each over all ranks.
        columns: the rank's part of K.
        first_column: where that begins.
        total_columns: K.
        padding: rows after the last that no matrix has.
    """

    shards: tuple[Shard, ...]
    first_rows: tuple[int, ...]
    total_rows: tuple[int, ...]
    columns: int
    first_column: int
    total_columns: int
    padding: int = 0


def shards_of(layer: nn.Module, columns: int, total_columns: int) -> LayerShards | None:
    """A layer's shards; None where it is no layer that is known.

    Args:
        layer: the layer.
        columns: the rank's part of K.
        total_columns: K.
    """
    if isinstance(layer, VocabParallelEmbedding):
        first = min(layer.vocab_start_index, layer.num_embeddings)
        own = min(layer.vocab_end_index, layer.num_embeddings) - first
        shard = Shard(0, 0, 0, own)
        padding = layer.num_embeddings_per_partition - own
        total = layer.num_embeddings
        return LayerShards((shard,), (first,), (total,), columns, 0, total_columns, padding)
    if not isinstance(layer, LinearBase):
        return None
    shards = layer.output_shards
    return LayerShards(
        shards,
        tuple(shard.piece(layer.tp_rank) * shard.size for shard in shards),
        tuple(shard.size * shard.pieces(layer.tp_size) for shard in shards),
        columns,
        layer.tp_rank * columns if columns != total_columns else 0,
        total_columns,
    )


def pieces_of(layer: LayerShards, found: Sequence[StoredMatrix]) -> list[Piece] | None:
    """The piece that each shard is of its matrix; None where sizes are not the checkpoint's.

    Several shards that are one matrix in the checkpoint lie in it one after another.
    """
    pieces: list[Piece] = []
    rows_of: dict[str, int] = {}
    for number, matrix in enumerate(found):
        before = rows_of.get(matrix.name, 0)
        rows_of[matrix.name] = before + layer.total_rows[number]
        if matrix.state is None:
            return None
        pieces.append(
            Piece(
                matrix.name,
                matrix.state.scheme,
                layer.shards[number].size,
                layer.columns,
                before + layer.first_rows[number],
                matrix.shape[0],
                layer.first_column,
                matrix.shape[1],
                matrix.state.offset,
            )
        )
    sizes = all(matrix.shape == (rows_of[matrix.name], layer.total_columns) for matrix in found)
    return pieces if sizes else None


def create_packed(
    pieces: Sequence[Piece], attrs: Mapping[str, Any]
) -> Iterator[tuple[str, PackedParameter4bit]]:
    """The parameters that hold some pieces: (name after ``weight``, parameter)."""
    places = Places.of(pieces)
    nested = bool(pieces[0].scheme.nested)
    sizes = {
        "weight": (torch.uint8, places[-1].weight, [place.weight for place in places]),
        "absmax": (
            torch.uint8 if nested else torch.float32,
            places[-1].absmax,
            [place.absmax for place in places],
        ),
        "quant_map": (torch.float32, 16 * len(pieces), [16 * i for i in range(len(pieces))]),
    }
    if nested:
        starts = [place.nested_absmax for place in places]
        tables = [256 * i for i in range(len(pieces))]
        sizes["nested_absmax"] = torch.float32, places[-1].nested_absmax, starts
        sizes["nested_quant_map"] = torch.float32, 256 * len(pieces), tables
    for role, (dtype, size, starts) in sizes.items():
        cuts = [piece.cut(role, at) for piece, at in zip(pieces, starts, strict=False)]
        data = torch.empty(size, dtype=dtype)
        yield role, PackedParameter4bit(data, cuts=cuts, **attrs)


def parts_of(
    pieces: Sequence[Piece], tensors: Mapping[str, torch.Tensor]
) -> Iterator[tuple[Piece, Quantised]]:
    """Every piece with its part of flat tensors, given by role: views."""
    places = Places.of(pieces)
    nested, maps = tensors.get("nested_absmax"), tensors.get("quant_map")
    for i, piece in enumerate(pieces):
        at = places[i]
        yield (
            piece,
            Quantised(
                tensors["weight"].narrow(0, at.weight, piece.nbytes),
                tensors["absmax"].narrow(0, at.absmax, piece.blocks),
                None if maps is None else maps.narrow(0, 16 * i, 16),
                None
                if nested is None
                else nested.narrow(0, at.nested_absmax, piece.nested_span[1]),
                None if nested is None else tensors["nested_quant_map"].narrow(0, 256 * i, 256),
                None if nested is None else tensors["nested_offset"][i],
            ),
        )


def merged(
    pieces: Sequence[Piece], tensors: Mapping[str, torch.Tensor]
) -> Iterator[tuple[Piece, Quantised]]:
    """As ``parts_of``, with plain scales; neighbours whose blocks do not mix are one matrix."""
    if len(pieces) == 1 or pieces[0].scheme.nested or not _alike(pieces):
        yield from parts_of(pieces, tensors)
        return
    first = pieces[0]
    one = Piece.whole(first.scheme, sum(piece.rows for piece in pieces), first.columns)
    yield one, Quantised(tensors["weight"], tensors["absmax"])


def _alike(pieces: Sequence[Piece]) -> bool:
    """Whether pieces one after another are one matrix, quantised in one way."""
    first = pieces[0]
    return not first.scheme.own_code and all(
        (piece.scheme.kind, piece.scheme.blocksize, piece.columns)
        == (first.scheme.kind, first.scheme.blocksize, first.columns)
        and not piece.scheme.own_code
        and piece.numel % piece.scheme.blocksize == 0
        for piece in pieces
    )
