"""Which experts' tensors elements that nothing was written to belong to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loadkit_layers.fused_moe.parameter import ExpertParameter

__all__ = ["describe_missing"]

Span = tuple[int, int]


def describe_missing(
    param: ExpertParameter,
    spans: Sequence[Span],
    slots: Mapping[int, tuple[int, ...]],
    num_experts: int,
    projections: Mapping[str, str],
) -> list[str]:
    """One sentence per expert's tensor that is missing, or one for all experts from some number on.

    Args:
        param: the parameter.
        spans: [start, end) of its elements that nothing was written to.
        slots: of each expert of this rank.
        num_experts: over all ranks.
        projections: shard id to what checkpoints call it.

    Returns:
        Nothing where the rank has all experts and none of them is there.
    """
    ordered = sorted(spans)
    missing: dict[int, list[str]] = {}
    for expert, own in sorted(slots.items()):
        for shard in param.shards:
            if any(_touches(_region(param, slot, str(shard.id)), ordered) for slot in own):
                missing.setdefault(expert, []).append(projections[str(shard.id)])
    whole = {expert for expert, parts in missing.items() if len(parts) == len(param.shards)}
    first = min(whole, default=0)
    absent = [expert for expert in slots if expert >= first]
    if whole and all(expert in whole for expert in absent) and len(whole) == len(missing):
        if first == 0:
            return []
        if len(absent) > 1:
            return [
                f"experts {first} to {num_experts - 1} have no {' and no '.join(missing[first])}: "
                f"the config has {num_experts} experts, the checkpoint fewer"
            ]
    return [f"expert {e} has no {part}" for e, parts in missing.items() for part in parts]


def _region(param: ExpertParameter, slot: int, shard_id: str) -> Span:
    """[start, end) of a shard of a slot, in elements of the parameter."""
    part = param.part(slot, shard_id)
    start = int(part.storage_offset()) - int(param.storage_offset())
    return start, start + part.numel()


def _touches(region: Span, ordered: Sequence[Span]) -> bool:
    return any(start < region[1] and region[0] < end for start, end in ordered)
