"""Process groups of a layout: whoever talks between ranks makes its own, when all have joined.

Making a group takes every rank of the world at the same moment. Layers know which groups they need,
and whoever starts ranks knows the moment; neither has to know the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from loadkit.errors import DistributedError
from loadkit.parallel_config import ParallelConfig

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["check_world", "make_groups", "makes_groups"]

Maker = Callable[[ParallelConfig], None]

_makers: list[Maker] = []


def makes_groups(maker: Maker) -> Maker:
    """Register (as a decorator) what makes a library's groups, once per layout."""
    if maker not in _makers:
        _makers.append(maker)
    return maker


def make_groups(parallel: ParallelConfig) -> None:
    """Make the groups of everything imported so far; every rank of the world has to call it."""
    for maker in _makers:
        maker(parallel)


def check_world(parallel: ParallelConfig) -> dist.ProcessGroup:
    """The group of all ranks, after comparing it with a place in a layout.

    Raises:
        DistributedError: torch.distributed is not initialised, or disagrees with ``parallel``.
    """
    import torch.distributed as dist

    layout = f"dp {parallel.dp_size} x pp {parallel.pp_size} x tp {parallel.tp_size}"
    if not (dist.is_available() and dist.is_initialized()):
        raise DistributedError(
            f"{layout} needs torch.distributed, which is not initialised in this process",
            hint="start with torchrun and call torch.distributed.init_process_group first",
        )
    if dist.get_world_size() != parallel.world_size:
        raise DistributedError(
            f"{layout} is {parallel.world_size} ranks; torch.distributed has "
            f"{dist.get_world_size()}",
            detail={"expected": parallel.world_size, "world_size": dist.get_world_size()},
        )
    if dist.get_rank() != parallel.rank:
        raise DistributedError(
            f"{parallel} is rank {parallel.rank} of {layout}; "
            f"torch.distributed says this process is rank {dist.get_rank()}",
            detail={"expected": parallel.rank, "rank": dist.get_rank()},
        )
    world = dist.group.WORLD
    if world is None:
        raise DistributedError("torch.distributed has no default group")
    return world
