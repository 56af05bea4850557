"""The memory of this process behind a tensor, which for a DTensor is its local part.

A parameter that is spread over a device mesh has one shape for all ranks and memory for a part of
it. Loading, and what is checked of it, is about that memory. Nothing here talks to another rank: a
DTensor knows its mesh, its placements and where this rank stands.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from loadkit.errors import WeightLoadError

__all__ = ["is_spread", "local_of", "local_regions", "mesh_device", "reshard", "with_memory"]

Cut = tuple[int, int, int, int]
"""(dim, start, length, source): along ``dim`` the local part's [start, start + length) is the whole
tensor's [source, source + length)."""

Run = tuple[int, int]
"""``(start, length)`` of neighbouring indices along one dim of the whole tensor."""


def is_spread(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # nobody has one before it is imported
    kind = getattr(module, "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor that is this process's memory: the tensor itself, or a DTensor's part."""
    if not is_spread(tensor):
        return tensor
    spread: Any = tensor
    local: torch.Tensor = spread._local_tensor
    return local


def with_memory(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """A tensor of the same type, attributes and layout over other memory (a DTensor's part)."""
    twin: torch.Tensor
    if is_spread(tensor):
        spread: Any = tensor
        twin = type(spread)(data, spread._spec, requires_grad=tensor.requires_grad)
    else:
        twin = torch.Tensor._make_subclass(type(tensor), data, tensor.requires_grad)
    twin.__dict__.update(tensor.__dict__)
    return twin


def local_regions(param: torch.Tensor) -> Iterator[tuple[torch.Tensor, list[Cut]]]:
    """This process's memory of a parameter, and which region of it takes which of a whole tensor.

    One for a plain parameter, all of it. For a DTensor one per box: several where its shards are
    strided, none where this rank holds nothing of it.

    Raises:
        WeightLoadError: a placement that does not say which elements are here (``Partial``), or a
            local part of another size than the placements say.
    """
    if not is_spread(param):
        yield param, []
        return
    spread: Any = param
    local, runs = local_of(param), _runs(spread)
    size = [sum(length for _, length in of_dim) for of_dim in runs]
    if local.numel() == 0 and 0 in size:
        return
    if list(local.shape) != size:
        raise WeightLoadError(
            f"the local part of a DTensor {list(param.shape)} is {list(local.shape)}; its "
            f"placements {_shown(spread)} say {size}",
            detail={"local_shape": list(local.shape), "expected_shape": size},
        )
    for box in itertools.product(*(_cuts(dim, of_dim) for dim, of_dim in enumerate(runs))):
        yield local, list(box)


def mesh_device(module: nn.Module) -> str | None:
    """The device type of the meshes that parameters without memory are spread over, if any."""
    for param in module.parameters():
        if is_spread(param) and param.device.type == "meta":
            spread: Any = param
            return str(spread.device_mesh.device_type)
    return None


def reshard(module: nn.Module) -> None:
    """Let every part of a ``fully_shard`` module hold its sharded parameters again.

    After a forward pass some keep the gathered ones, which the next resharding throws away.
    """
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if fsdp is not None:
        for part in module.modules():
            if isinstance(part, fsdp):
                part.reshard()


def _runs(spread: Any) -> list[list[Run]]:
    """For each dim the indices of the whole tensor that this rank holds, in their local order."""
    runs: list[list[Run]] = [[(0, size)] for size in spread.shape]
    coordinate = spread.device_mesh.get_coordinate()
    if coordinate is None:  # this rank is not in the mesh
        return [[(0, 0)] for _ in spread.shape]
    for mesh_dim in _mesh_order(spread):
        placement = spread.placements[mesh_dim]
        if placement.is_replicate():
            continue
        dim = _shard_dim(placement)
        if dim is None:
            raise WeightLoadError(
                f"a DTensor {list(spread.shape)} with placements {_shown(spread)} cannot be "
                "loaded: one of them does not say which elements are here",
                hint="spread parameters with Shard and Replicate",
            )
        ranks, rank = spread.device_mesh.size(mesh_dim), coordinate[mesh_dim]
        factor = int(getattr(placement, "split_factor", 1))
        # A strided shard is a piece of each of `factor` pieces; a plain one has one such piece.
        pieces = [_chunk(runs[dim], factor, index) for index in range(factor)]
        runs[dim] = [run for piece in pieces for run in _chunk(piece, ranks, rank)]
    return runs


def _mesh_order(spread: Any) -> list[int]:
    """The mesh dims in the order in which they cut: left to right, unless the layout says other.

    It says so in one of two ways: by strided shards, cut left to right, or by an order beside plain
    shards.
    """
    mesh_dims = list(range(len(spread.placements)))
    if any(hasattr(placement, "split_factor") for placement in spread.placements):
        return mesh_dims
    order = getattr(spread._spec, "shard_order", None) or ()
    told = [mesh_dim for entry in order for mesh_dim in entry.mesh_dims]
    return told + [mesh_dim for mesh_dim in mesh_dims if mesh_dim not in told]


def _shard_dim(placement: Any) -> int | None:
    """The dim that a placement cuts; None where it is no shard of a known kind."""
    from torch.distributed.tensor import placement_types

    kinds = tuple(
        kind
        for name in ("Shard", "_StridedShard")
        if isinstance(kind := getattr(placement_types, name, None), type)
    )
    return int(placement.dim) if type(placement) in kinds else None


def _chunk(runs: Sequence[Run], count: int, index: int) -> list[Run]:
    """The ``index``-th of ``count`` pieces, as ``torch.chunk`` cuts: the last ones may be empty."""
    total = sum(length for _, length in runs)
    size = -(-total // count)
    first, last = min(size * index, total), min(size * (index + 1), total)
    found, at = [], 0
    for start, length in runs:
        low, high = max(first, at), min(last, at + length)
        if low < high:
            found.append((start + low - at, high - low))
        at += length
    return found


def _cuts(dim: int, runs: Sequence[Run]) -> list[Cut]:
    """The runs as regions of the local part; what are neighbours in both is one."""
    cuts: list[Cut] = []
    at = 0
    for start, length in runs:
        if cuts and cuts[-1][3] + cuts[-1][2] == start:
            _, before, joined, source = cuts.pop()
            cuts.append((dim, before, joined + length, source))
        else:
            cuts.append((dim, at, length, start))
        at += length
    return cuts


def _shown(spread: Any) -> str:
    return ", ".join(str(placement) for placement in spread.placements)
