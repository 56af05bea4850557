"""Any rank of a made-up world in this process: meshes without other processes behind them.

Collective operations of such a world give nonsense, so only what a rank computes alone is tested in
it; what ranks gather from each other is tested with real ones (``mesh_jobs``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = ["as_rank"]


_numbers = itertools.count()


@contextmanager
def as_rank(rank: int, shape: tuple[int, ...]) -> Iterator[DeviceMesh]:
    """This process as one rank of a mesh.

    Torch keeps what it knows of a mesh for all that are equal, and takes equal ones for the same
    rank's; so the dims of every mesh here have names of their own.
    """
    world = 1
    for size in shape:
        world *= size
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        number = next(_numbers)
        names = tuple(f"world{number}dim{dim}" for dim in range(len(shape)))
        yield init_device_mesh("cpu", shape, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()
