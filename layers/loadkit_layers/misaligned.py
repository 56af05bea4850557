"""Tensors stored in blocks that a tp size cuts inside one: problems of a plan, all at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from loadkit.errors import ModelError
from loadkit.file_checks import show
from loadkit.tracing.misfit import report_misfit
from loadkit_layers.sharding import legal_tp_sizes

__all__ = ["BlockCut", "report_misaligned"]


class BlockCut(Protocol):
    """A tensor whose parts would begin inside a block.

    Attributes:
        tensor: its name in the checkpoint.
        parameter: the dotted name of what it is a part of.
        kind: what its blocks are, for people.
        block: elements of a block.
        tp_size: the one that was asked for.
    """

    @property
    def tensor(self) -> str: ...
    @property
    def parameter(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def block(self) -> int: ...
    @property
    def tp_size(self) -> int: ...

    @property
    def cut(self) -> str:
        """What of it is cut ("192 columns")."""

    def fits(self, tp: int) -> bool:
        """Whether tp ranks cut it on borders of blocks."""


def report_misaligned(bad: Sequence[BlockCut], hf_config: Any, *, code: str, opt_out: str) -> None:
    """Tell the plan of every such tensor, with the tp sizes that fit it and those that fit all.

    Args:
        bad: the tensors.
        hf_config: the text model's config: a tp size has to divide its heads too.
        code: the problem's code.
        opt_out: how such layers are decoded instead, for the hint.

    Raises:
        ModelError: the first one, with ``code``, where no plan is under way.
    """
    heads = getattr(hf_config, "num_attention_heads", None) or 0
    kv_heads = getattr(hf_config, "num_key_value_heads", None) or heads

    def legal(tensors: Sequence[BlockCut]) -> list[int]:
        def fits(tp: int) -> bool:
            grouped = not kv_heads or kv_heads % tp == 0 or tp % kv_heads == 0
            return heads % tp == 0 and grouped and all(one.fits(tp) for one in tensors)

        return legal_tp_sizes(fits)

    every = legal(bad) if bad else []
    for one in bad:
        own = legal([one])
        message = (
            f"tensor {show(one.tensor)} has {one.cut} in {one.kind} blocks of {one.block}: "
            f"tp {one.tp_size} cuts inside one; legal: tp {_list(own)}"
        )
        hint = f"tp {_list(every)} fits every tensor; or decode such layers: {opt_out}"
        if not report_misfit(
            code, name=one.tensor, target=one.parameter, message=message, hint=hint
        ):
            raise ModelError(
                message,
                code=code,
                tensor=one.tensor,
                parameter=one.parameter,
                detail={"block": one.block, "legal": own},
                hint=hint,
            )


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
