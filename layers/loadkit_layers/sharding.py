"""How one checkpoint tensor is cut over the tensor-parallel ranks, and the one copy that does it.

R is the tp size. A *shard* is one of the layers fused into a parameter (q, k, v; gate, up); every
rank holds a piece of each shard. Sizes count rows of the unpacked weight unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from loadkit.errors import ModelError, WeightLoadError
from loadkit.tracing.regions import copy_region

__all__ = [
    "Cut",
    "Shard",
    "copy_cut",
    "legal_tp_sizes",
    "misfit",
    "require_divisible",
    "split_shards",
]

LEGAL_TP_LIMIT = 64  # errors list the legal tp sizes up to here


@dataclass(frozen=True, slots=True)
class Shard:
    """One layer fused into a parameter, along the output dim, as one rank sees it.

    Attributes:
        id: what a weight loader is called with: 0..n-1, or "q", "k", "v".
        index: its place among the shards of the parameter.
        offset: where it starts in the rank's parameter, in rows.
        size: the rank's rows of it.
        replicas: how many neighbouring ranks hold the same rows (1: every rank its own).
    """

    id: int | str
    index: int
    offset: int
    size: int
    replicas: int = 1

    def pieces(self, tp_size: int) -> int:
        """How many different pieces the checkpoint's rows are cut into."""
        return tp_size // self.replicas

    def piece(self, tp_rank: int) -> int:
        """Which of the pieces this rank holds."""
        return tp_rank // self.replicas


@dataclass(frozen=True, slots=True)
class Cut:
    """Along ``dim``: parameter [start, start + length) is tensor [source, source + length)."""

    dim: int
    start: int
    length: int
    source: int
    source_size: int


def copy_cut(param: torch.Tensor, loaded: torch.Tensor, *cuts: Cut, what: str = "") -> None:
    """Copy a region of a checkpoint tensor into a region of a parameter.

    Dims without a cut are taken whole. Shapes are checked before anything is touched, and only
    views and one ``copy_`` are used. A tensor of one element fits a region of one element whatever
    the number of dims; nothing else is broadcast.

    Args:
        param: the parameter, any device.
        loaded: the checkpoint tensor.
        cuts: at most one per dim.
        what: which part of the parameter this is, for the error ("shard 1 of 2").

    Raises:
        WeightLoadError: the tensor's shape is not the one the parameter takes.
    """
    expected = list(param.shape)
    for cut in cuts:
        expected[cut.dim] = cut.source_size
    if list(loaded.shape) != expected:
        if prod(expected) != 1 or loaded.numel() != 1:
            raise misfit(param, loaded, expected, what=what)
        loaded = loaded.view(expected)
    copy_region(param, loaded, [(cut.dim, cut.start, cut.length, cut.source) for cut in cuts])


def misfit(
    param: torch.Tensor,
    loaded: torch.Tensor,
    expected: Sequence[int] | str,
    *,
    what: str = "",
    hint: str | None = None,
) -> WeightLoadError:
    """The error of a tensor that a parameter does not take; names both shapes."""
    name = getattr(param, "parameter_name", "") or "without a name"
    rank, size = getattr(param, "tp_rank", 0), getattr(param, "tp_size", 1)
    where = f" (tp rank {rank} of {size})" if size > 1 else ""
    takes = expected if isinstance(expected, str) else str(list(expected))
    return WeightLoadError(
        f"the checkpoint tensor is {list(loaded.shape)}; parameter {name} {list(param.shape)}"
        f"{where} takes {takes}" + (f" for {what}" if what else ""),
        parameter=getattr(param, "parameter_name", "") or None,
        detail={
            "checkpoint_shape": list(loaded.shape),
            "parameter_shape": list(param.shape),
            "expected_shape": None if isinstance(expected, str) else list(expected),
        },
        hint=hint,
    )


def split_shards(
    sizes: Sequence[int],
    tp_size: int,
    *,
    prefix: str,
    ids: Sequence[int | str] | None = None,
) -> tuple[Shard, ...]:
    """The rank's shards of a fused output: each full size in ``sizes`` divided by R.

    Raises:
        ModelError: ``TP_INDIVISIBLE``, naming the layer and the tp sizes that would do.
    """
    require_divisible(prefix, tp_size, sizes)
    shards: list[Shard] = []
    offset = 0
    for index, full in enumerate(sizes):
        size = full // tp_size
        shards.append(Shard(index if ids is None else ids[index], index, offset, size))
        offset += size
    return tuple(shards)


def require_divisible(
    prefix: str,
    tp_size: int,
    sizes: Sequence[int],
    *,
    unit: str = "size",
    legal: Callable[[int], bool] | None = None,
) -> None:
    """Refuse a tp size that does not divide every one of ``sizes``.

    Args:
        prefix: the layer's dotted name, for the error.
        tp_size: the tp size asked for.
        sizes: what has to be divided.
        unit: what the sizes count, for the error ("output size", "attention heads").
        legal: a narrower rule than "divides every size"; decides and lists the legal tp sizes.

    Raises:
        ModelError: ``TP_INDIVISIBLE``; ``detail["legal"]`` lists the tp sizes that would do.
    """

    def divides(tp: int) -> bool:
        return all(size % tp == 0 for size in sizes)

    fits = legal or divides
    if fits(tp_size):
        return
    good = legal_tp_sizes(fits)
    shown = ", ".join(str(size) for size in sizes)
    raise ModelError(
        f"layer {prefix or '(no prefix)'}: {unit} {shown} cannot be split over tp {tp_size}",
        code="TP_INDIVISIBLE",
        detail={"legal": good, "layer": prefix, "sizes": list(sizes), "tp_size": tp_size},
        hint="tp sizes that fit: " + ", ".join(str(tp) for tp in good),
    )


def legal_tp_sizes(fits: Callable[[int], bool], limit: int = LEGAL_TP_LIMIT) -> list[int]:
    """The tp sizes up to ``limit`` that satisfy a rule, in order."""
    return [tp for tp in range(1, limit + 1) if fits(tp)]
