"""Matrices whose parts begin inside a block at some tp sizes: problems of a plan, all at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from loadkit_bitsandbytes.piece import Piece
from loadkit_layers import misaligned

__all__ = ["Misaligned", "mark", "report_misaligned"]

_MARK = "bitsandbytes_misaligned"  # the attribute of such a layer


class Misaligned(NamedTuple):
    """A matrix that cannot be cut over tp ranks on borders of blocks."""

    tensor: str
    kind: str
    block: int
    rows: int
    columns: int
    cuts_columns: bool
    parameter: str
    tp_size: int

    @classmethod
    def of(cls, piece: Piece, parameter: str, tp_size: int) -> Misaligned:
        """That of a piece that does not fit."""
        scheme, whole = piece.scheme, (piece.source_rows, piece.source_columns)
        cut = piece.cuts_columns
        return cls(piece.tensor, scheme.kind, scheme.blocksize, *whole, cut, parameter, tp_size)

    @property
    def cut(self) -> str:
        """What of it is cut."""
        return f"{self.columns} columns" if self.cuts_columns else f"{self.rows} rows"

    def fits(self, tp: int) -> bool:
        """Whether tp ranks cut it on borders of blocks."""
        if tp == 1:
            return True
        if self.cuts_columns:
            return self.columns % (tp * self.block) == 0
        return self.rows % tp == 0 and self.rows // tp * self.columns % self.block == 0


def mark(layer: nn.Module, bad: Sequence[Misaligned]) -> None:
    """Note on a layer what of it does not fit; ``report_misaligned`` tells."""
    setattr(layer, _MARK, (*getattr(layer, _MARK, ()), *bad))


def report_misaligned(model: nn.Module, hf_config: Any) -> None:
    """Tell the plan of every matrix that tp cuts inside a block.

    Raises:
        ModelError: BNB_MISALIGNED, where no plan is under way.
    """
    bad: list[Misaligned] = [
        one for module in model.modules() for one in getattr(module, _MARK, ())
    ]
    misaligned.report_misaligned(
        bad,
        hf_config,
        code="BNB_MISALIGNED",
        opt_out="model_loader_extra_config={'misaligned': 'requantise'} (or 'decode')",
    )
