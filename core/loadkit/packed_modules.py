"""A class's ``packed_modules_mapping``, turned around: from a part to the fused module it is in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["Packed", "find_fused", "invert_packed"]

# a part's module name -> (the fused module's name, the shard id), one per fused module it is in
Packed = Mapping[str, tuple[tuple[str, Any], ...]]


def invert_packed(mapping: Mapping[str, Sequence[str]]) -> Packed:
    """Parts by name, with the shard ids their fused layer takes.

    ``{"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}``:
    three parts that begin with q, k and v (``query``, ``key``, ``value`` too) are the shards
    "q", "k" and "v"; any others are counted from 0. An entry of one part is no fusion.
    """
    found: dict[str, tuple[tuple[str, Any], ...]] = {}
    for fused, parts in mapping.items():
        if isinstance(parts, str) or len(parts) < 2:
            continue
        initials = [part.rpartition(".")[2][:1] for part in parts]
        ids: Sequence[Any] = initials if initials == ["q", "k", "v"] else range(len(parts))
        for part, shard_id in zip(parts, ids, strict=True):
            if part != fused:
                found[part] = (*found.get(part, ()), (fused, shard_id))
    return found


def find_fused(
    module: torch.nn.Module, head: str, packed: Packed | None
) -> tuple[str, Any, torch.nn.Module] | None:
    """The fused module in ``module`` that ``head`` is a part of: its name, the shard id, itself."""
    for fused, shard_id in (packed or {}).get(head, ()):
        child = module._modules.get(fused)
        if child is not None:
            return fused, shard_id, child
    return None
