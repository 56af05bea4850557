"""Matrices whose parts begin inside a block at some tp sizes: problems of a plan, all at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from loadkit.errors import ModelError
from loadkit.file_checks import show
from loadkit.tracing.misfit import report_misfit
from loadkit_bitsandbytes.piece import Piece
from loadkit_layers.sharding import legal_tp_sizes

__all__ = ["Misaligned", "mark", "report_misaligned"]

_MARK = "bitsandbytes_misaligned"  # the attribute of such a layer


class Misaligned(NamedTuple):
    """A matrix that cannot be cut over tp ranks on borders of blocks."""

    tensor: str
    kind: str
    blocksize: int
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

    def fits(self, tp: int) -> bool:
        """Whether tp ranks cut it on borders of blocks."""
        if tp == 1:
            return True
        if self.cuts_columns:
            return self.columns % (tp * self.blocksize) == 0
        return self.rows % tp == 0 and self.rows // tp * self.columns % self.blocksize == 0


def mark(layer: nn.Module, bad: Sequence[Misaligned]) -> None:
    """Note on a layer what of it does not fit; ``report_misaligned`` tells."""
    setattr(layer, _MARK, (*getattr(layer, _MARK, ()), *bad))


def report_misaligned(model: nn.Module, hf_config: Any) -> None:
    """Tell the plan of every matrix that tp cuts inside a block.

    Raises:
        ModelError: BNB_MISALIGNED, where no plan is under way.
    """
    bad = [one for module in model.modules() for one in getattr(module, _MARK, ())]
    heads = getattr(hf_config, "num_attention_heads", None) or 0
    kv_heads = getattr(hf_config, "num_key_value_heads", None) or heads

    def fits(tp: int, tensors: Sequence[Misaligned]) -> bool:
        grouped = not kv_heads or kv_heads % tp == 0 or tp % kv_heads == 0
        return heads % tp == 0 and grouped and all(one.fits(tp) for one in tensors)

    every = legal_tp_sizes(lambda tp: fits(tp, bad)) if bad else []
    for one in bad:
        legal = legal_tp_sizes(lambda tp, one=one: fits(tp, [one]))  # type: ignore[misc]
        what = f"{one.columns} columns" if one.cuts_columns else f"{one.rows} rows"
        message = (
            f"tensor {show(one.tensor)} has {what} in {one.kind} blocks of {one.blocksize}: "
            f"tp {one.tp_size} cuts inside one; legal: tp {_list(legal)}"
        )
        hint = (
            f"tp {_list(every)} fits every tensor; or decode such layers: "
            "model_loader_extra_config={'misaligned': 'requantise'} (or 'decode')"
        )
        if not report_misfit(
            "BNB_MISALIGNED", name=one.tensor, target=one.parameter, message=message, hint=hint
        ):
            raise ModelError(
                message,
                code="BNB_MISALIGNED",
                tensor=one.tensor,
                parameter=one.parameter,
                detail={"block": one.blocksize, "legal": legal},
                hint=hint,
            )


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
