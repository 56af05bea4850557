"""What a ``.metadata`` says, for people: ``loadkit inspect`` reads it and no data file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from loadkit.tensor_info import bits_of
from loadkit_dcp.metadata import read_metadata
from loadkit_dcp.select import choose

if TYPE_CHECKING:
    from loadkit.sources.base import File

__all__ = ["HeaderSummary", "Row", "summary_of"]


@dataclass(frozen=True, slots=True)
class _Named:
    """A file that is not open."""

    name: str


@dataclass(frozen=True, slots=True)
class Row:
    """A box of a tensor: ``shape`` its size in elements, ``offset`` where its item begins."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: _Named
    offset: int
    nbytes: int


class HeaderSummary(NamedTuple):
    """A metadata file as ``loadkit inspect`` shows it."""

    tensors: tuple[Row, ...]
    metadata: Mapping[str, str | int]


def summary_of(file: File, weights_key: str | None = None) -> HeaderSummary:
    """Every box of every tensor, those of optimizers too, in file order.

    Args:
        file: a metadata file.
        weights_key: of ``LoadConfig``: only what is under it, by the names there.

    Raises:
        FormatError: the metadata breaks a rule.
        OptionError: nothing is under ``weights_key``.
        ReadFailure: it could not be read.
    """
    metadata = read_metadata(file)
    rows = []
    names = dict(zip(metadata.paths, metadata.paths, strict=True))
    if weights_key is not None:
        names = choose(dict(metadata.paths), weights_key, file.name).names
    for name, called in names.items():
        tensor = metadata.tensor(name)
        for box in tensor.boxes:
            if box.place is None:
                continue
            nbytes = -(-box.numel * bits_of(tensor.dtype) // 8)
            place = _Named(box.place.file)
            rows.append(Row(called, tensor.dtype, box.sizes, place, box.place.offset, nbytes))
    rows.sort(key=lambda row: (row.file.name, row.offset))
    told: dict[str, str | int] = {
        "format": "torch distributed checkpoint",
        "version": metadata.version,
        "tensors": len(names),
        "other entries": len(metadata.others),
    }
    return HeaderSummary(tuple(rows), told)
