"""What checkpoints call an expert's tensors, and where these go.

``5.gate_proj.weight`` and Mixtral's ``5.w1.weight`` are one expert's; ``gate_up_proj`` and
``down_proj`` are all experts' in one tensor, dim 0 counting them. What comes after the projection
is the parameter's suffix: ``5.w2.weight_scale_inv`` is a part of ``w2_weight_scale_inv``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

__all__ = ["PROJECTIONS", "ExpertShard", "find_place", "parse_expert"]

# projection -> (parameter, shard); no shard: all that the parameter has
PROJECTIONS: dict[str, tuple[str, str | None]] = {
    "gate_proj": ("w13", "w1"),
    "up_proj": ("w13", "w3"),
    "down_proj": ("w2", "w2"),
    "gate_up_proj": ("w13", None),
    "w1": ("w13", "w1"),
    "w3": ("w13", "w3"),
    "w2": ("w2", "w2"),
    "w13": ("w13", None),
}
_LONGEST_FIRST = sorted(PROJECTIONS, key=len, reverse=True)
_FUSED_BY_MAPPER = {0: "w1", 1: "w3"}  # what mappers call the parts of gate_up_proj


class ExpertShard(NamedTuple):
    """A part of one expert (None: of all of them); ``id`` None: all parts."""

    id: str | None
    expert: int | None


def parse_expert(text: str) -> int | None:
    """The number a name's first component is, written the one way numbers are; else None."""
    if not text.isascii() or not text.isdecimal() or (text[0] == "0" and text != "0"):
        return None
    return int(text)


@lru_cache(maxsize=1 << 14)
def find_place(name: str, shard_id: object = None) -> tuple[str, ExpertShard] | None:
    """(parameter, part) that a name relative to the layer stands for, or None.

    Args:
        name: ``5.up_proj.weight``, ``down_proj``, ``gate_up_proj_scale_inv``.
        shard_id: 0 or 1 where a mapper made ``gate_up_proj`` of gate and up.
    """
    head, *rest = name.split(".")
    expert = parse_expert(head)
    if expert is not None:
        if not rest:
            return None
        head, *rest = rest
    found = PROJECTIONS.get(head)
    if found is None:
        stem = next((p for p in _LONGEST_FIRST if head.startswith(f"{p}_")), None)
        if stem is None:
            return None
        found, tail = PROJECTIONS[stem], head[len(stem) + 1 :]
        rest = [f"weight_{tail}" if tail.startswith("scale") else tail, *rest]
    parameter, part = found
    if shard_id is not None:
        if part is not None or shard_id not in _FUSED_BY_MAPPER:
            return None
        part = _FUSED_BY_MAPPER[shard_id]
    suffix = "_".join(rest) or "weight"
    return f"{parameter}_{suffix}", ExpertShard(part, expert)
