"""Which stored tensors are the shards of a module's weight: packed formats keep such tables.

A table maps a module's path to (shard id -> tensor). The id is None for a tensor that is the whole
weight, a tuple for several shards that are one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from loadkit.packed_modules import invert_packed
from loadkit_layers.sharding import Shard

__all__ = ["entries_of", "of_shards"]

StoredT = TypeVar("StoredT")


def entries_of(
    table: Mapping[str, Mapping[Any, StoredT]], module: str, fusions: Mapping[str, Sequence[str]]
) -> Mapping[Any, StoredT]:
    """A module's tensors by shard id.

    Args:
        table: module -> shard id -> tensor.
        module: its dotted name.
        fusions: fused module -> its parts, where the table has the parts by themselves.
    """
    entries = table.get(module)
    if entries is not None:
        return entries
    stem, _, last = module.rpartition(".")
    found: dict[Any, StoredT] = {}
    for part, places in invert_packed(fusions).items():
        for fused, shard_id in places:
            path = f"{stem}.{part}" if stem else part
            tensor = table.get(path, {}).get(None) if fused == last else None
            if tensor is not None:
                found[shard_id] = tensor
    return found


def of_shards(entries: Mapping[Any, StoredT], shards: Sequence[Shard]) -> list[StoredT] | None:
    """The tensor of each shard, in order; None if one has none."""
    found: list[StoredT] = []
    for shard in shards:
        tensor = next((t for key, t in entries.items() if _holds(key, shard)), None)
        if tensor is None:
            return None
        found.append(tensor)
    return found


def _holds(key: Any, shard: Shard) -> bool:
    """Whether a tensor with this shard id has a shard in it."""
    return key is None or key == shard.id or (isinstance(key, tuple) and shard.id in key)
