"""Sums and gathers over the tensor-parallel ranks, by torch.distributed.

The world is dp x pp x tp: rank = (dp_rank * pp_size + pp_rank) * tp_size + tp_rank. Where this
process stands comes from an explicit ParallelConfig and is compared with torch.distributed; no
environment variable is read.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from loadkit.config import ParallelConfig
from loadkit.errors import DistributedError
from loadkit.parallel_groups import check_world, makes_groups

__all__ = ["all_gather", "all_reduce", "global_rank", "init_parallel_groups", "tp_group"]

# The tp group of this process, by the world it was made in and (dp, pp, tp). Worlds are held
# weakly: a group that outlives destroy_process_group keeps threads that abort when Python ends.
_groups: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, int, int], dist.ProcessGroup]] = (
    WeakKeyDictionary()
)


def global_rank(parallel: ParallelConfig) -> int:
    """This place's number in the world of dp x pp x tp."""
    return parallel.rank


@makes_groups
def init_parallel_groups(parallel: ParallelConfig) -> None:
    """Make the process groups of a layout, once; every rank of the world has to call it.

    Raises:
        DistributedError: torch.distributed is not initialised, or disagrees with ``parallel``.
    """
    world, layout = _key(parallel)
    groups = _groups.setdefault(world, {})
    if layout in groups:
        return
    R = parallel.tp_size
    for first in range(0, dist.get_world_size(), R):  # every rank makes every group, in this order
        group = dist.new_group(list(range(first, first + R)))
        if isinstance(group, dist.ProcessGroup) and first <= dist.get_rank() < first + R:
            groups[layout] = group


def tp_group(parallel: ParallelConfig) -> dist.ProcessGroup:
    """The group of the R ranks that share this rank's layers.

    Where tp is the whole world that is the default group; other layouts need
    ``init_parallel_groups`` first, because making groups takes every rank of the world.

    Raises:
        DistributedError: torch.distributed is not initialised or disagrees with ``parallel``, or
            the groups were not made.
    """
    world, layout = _key(parallel)
    found = _groups.get(world, {}).get(layout)
    if found is not None:
        return found
    if parallel.tp_size == dist.get_world_size():
        return world
    raise DistributedError(
        f"the process groups of dp {parallel.dp_size} x pp {parallel.pp_size} x tp "
        f"{parallel.tp_size} are not made",
        hint="call loadkit_layers.init_parallel_groups(parallel) on every rank first",
    )


def all_reduce(x: torch.Tensor, parallel: ParallelConfig) -> torch.Tensor:
    """The sum of ``x`` over the tp ranks; ``x`` itself may be overwritten. At tp 1, ``x``."""
    if parallel.tp_size == 1:
        return x
    x = x.contiguous()
    dist.all_reduce(x, group=tp_group(parallel))
    return x


def all_gather(x: torch.Tensor, parallel: ParallelConfig, dim: int = -1) -> torch.Tensor:
    """The ranks' tensors, of one shape, joined along ``dim`` in rank order. At tp 1, ``x``."""
    if parallel.tp_size == 1:
        return x
    parts = [
        torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(parallel.tp_size)
    ]
    dist.all_gather(parts, x.contiguous(), group=tp_group(parallel))
    return torch.cat(parts, dim=dim)


def _key(parallel: ParallelConfig) -> tuple[dist.ProcessGroup, tuple[int, int, int]]:
    """The world and the layout, after comparing the two."""
    return check_world(parallel), (parallel.dp_size, parallel.pp_size, parallel.tp_size)
