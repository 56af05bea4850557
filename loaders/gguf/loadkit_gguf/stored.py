"""A model's tensor on its way into a GGUF file: changed, encoded and handed on, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from loadkit.safetensors_writer import blocks_of
from loadkit_gguf.encode import ENCODERS, encode_rows
from loadkit_gguf.ggml_types import GGMLType
from loadkit_gguf.writer import StoredTensor

__all__ = ["Piece", "stored_tensor"]

PIECE = 4 << 20  # elements that are encoded at once
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Piece:
    """A Hugging Face tensor: a view of a parameter, or on meta and given by ``make``.

    ``change`` makes of it what the file stores.
    """

    tensor: torch.Tensor
    make: Callable[[], torch.Tensor] | None
    change: Callable[[torch.Tensor], torch.Tensor]

    def value(self) -> torch.Tensor:
        """The numbers to store; small change of norms is computed in float32."""
        tensor = (self.tensor if self.make is None else self.make()).detach()
        return self.change(tensor.float() if tensor.dim() == 1 else tensor)


def stored_tensor(
    name: str, pieces: Sequence[Piece], stacked: bool, kind: GGMLType
) -> StoredTensor:
    """A tensor of the file: one piece, or several that dim 0 counts."""
    shape = tuple(pieces[0].tensor.shape)
    size = (len(pieces), *shape) if stacked else shape
    return StoredTensor(name, kind, size, partial(_blocks, tuple(pieces), kind.name))


def _blocks(pieces: Sequence[Piece], kind: str) -> Iterator[memoryview | bytes]:
    for piece in pieces:
        value = piece.value()
        rows = value if value.dim() > 1 else value[None]
        step = max(1, PIECE // max(1, rows[0].numel() if len(rows) else 1))
        for start in range(0, len(rows), step):
            yield from blocks_of(_encoded(rows[start : start + step], kind))


def _encoded(rows: torch.Tensor, kind: str) -> torch.Tensor:
    if kind in ENCODERS:
        return encode_rows(kind, rows.cpu())
    return rows.to(_PLAIN[kind])
