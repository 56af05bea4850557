"""A rank's saved tensors: where each lies, as one piece or cut into rows over several files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from loadkit.errors import FormatError, ShardedError
from loadkit.file_checks import show
from loadkit.tensor_info import DTYPES, TensorInfo, torch_dtype
from loadkit.tracing.lazy_tensor import LazyTensor
from loadkit.tracing.storage import FileLeaf, Storage, Unwritten, Value, Write
from loadkit.tracing.view import View, contiguous

__all__ = ["Piece", "Stored", "bad_tensor", "joined"]


@dataclass(frozen=True, slots=True)
class Piece:
    """What of a parameter lies in one place: ``row`` is its first row; ``rows`` of the whole, or
    None where it is not cut.
    """

    info: TensorInfo
    row: int = 0
    rows: int | None = None


@dataclass(frozen=True)
class Stored:
    """One saved parameter or buffer: ``pieces`` in order; ``shape`` in elements of torch."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def view(self) -> View:
        """All of it, row-major."""
        return contiguous(self.shape, self.dtype.itemsize)

    def storage(self, name: str | None = None) -> Storage:
        """Its elements, not read yet; ``name`` is what the plan calls them."""
        leaves = [_leaf(piece.info, name or self.name) for piece in self.pieces]
        if len(leaves) == 1:
            return Storage.of_leaf(leaves[0])
        whole = Storage(Unwritten(self.name), self.view.numel, self.view.itemsize)
        for piece, leaf in zip(self.pieces, leaves, strict=True):
            rows = self.view.narrow(0, piece.row, leaf.size[0])
            value = Value(
                Storage.of_leaf(leaf), 0, contiguous(leaf.size, rows.itemsize), self.dtype
            )
            whole.writes.append(Write(rows, self.dtype, value))
        return whole

    def lazy(self) -> LazyTensor:
        """The tensor, not read yet; a new one each time."""
        return LazyTensor(self.storage(), self.view, self.dtype)


def _leaf(info: TensorInfo, name: str) -> FileLeaf:
    """A tensor of a file; two packed 4-bit elements are one element in torch."""
    return FileLeaf(info, name, _torch_shape(info), torch_dtype(info.dtype))


def _torch_shape(info: TensorInfo) -> tuple[int, ...]:
    if DTYPES[info.dtype][0] == 4:
        return (*info.shape[:-1], info.shape[-1] // 2)
    return info.shape


def joined(rank: int, found: Mapping[str, Sequence[Piece]]) -> dict[str, Stored]:
    """A rank's tensors, each whole.

    Args:
        rank: whose, for errors.
        found: name -> its pieces, in any order.

    Raises:
        ShardedError: a tensor is there twice, its pieces overlap, leave a hole or do not fit.
        FormatError: E_DTYPE, this torch lacks a dtype.
    """
    return {name: _joined(rank, name, pieces) for name, pieces in found.items()}


def _joined(rank: int, name: str, pieces: Sequence[Piece]) -> Stored:
    ordered = tuple(sorted(pieces, key=lambda piece: (piece.row, piece.info.file.name)))
    first = ordered[0]
    if len(ordered) > 1 or first.rows is not None:
        _check_rows(rank, name, ordered)
    try:
        dtype = torch_dtype(first.info.dtype)
    except FormatError as error:
        raise FormatError(
            f"tensor {show(name)} of {show(first.info.file.name)}: {error.message}",
            code=error.code,
            file=first.info.file.name,
            tensor=name,
            hint="install a newer torch",
        ) from error
    shape = _torch_shape(first.info)
    if first.rows is not None:
        shape = (first.rows, *shape[1:])
    return Stored(name, dtype, shape, ordered)


def _check_rows(rank: int, name: str, pieces: Sequence[Piece]) -> None:
    """Pieces of one tensor follow each other and end where it ends."""
    first = pieces[0]
    files = [piece.info.file.name for piece in pieces]
    at = 0
    for piece in pieces:
        info = piece.info
        problem = None
        if piece.rows is None:
            problem = "is there twice"
        elif piece.rows != first.rows:
            problem = f"has {first.rows} rows by one file and {piece.rows} by another"
        elif (info.dtype, info.shape[1:]) != (first.info.dtype, first.info.shape[1:]):
            problem = "has parts that do not fit together"
        elif piece.row < at:
            problem = f"has rows {piece.row}..{at - 1} twice: its parts overlap"
        elif piece.row > at:
            problem = f"lacks rows {at}..{piece.row - 1}: its parts leave a hole"
        if problem is not None:
            raise bad_tensor(rank, name, problem, files, info)
        at += info.shape[0]
    if at != first.rows:
        problem = f"lacks rows {at}..{(first.rows or 0) - 1}: its parts leave a hole"
        raise bad_tensor(rank, name, problem, files, pieces[-1].info)


def bad_tensor(
    rank: int, name: str, problem: str, files: Iterable[str], info: TensorInfo
) -> ShardedError:
    """The error of one tensor of a rank."""
    listed = list(dict.fromkeys(files))
    return ShardedError(
        f"tensor {show(name)} of rank {rank} {problem} ({', '.join(map(show, listed))})",
        file=info.file.name,
        tensor=name,
        offset=info.offset,
        detail={"rank": rank, "files": listed},
        hint="the files are not of one save; copy them again, or save the model again",
    )
