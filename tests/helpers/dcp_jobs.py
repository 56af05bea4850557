"""What real ranks save in tests of checkpoints: importable by their processes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from helpers.checkpoints import llama_sd
from loadkit.rank_worker import Rank

__all__ = ["LAYOUTS", "SIZES", "WORLD", "odd_tensors", "save_job"]

WORLD = 4
SIZES = {"vocab": 41, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 60}  # 41 and 60: uneven
# name -> the mesh's shape, and how a matrix lies over it
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {
    "rows": ((4,), (Shard(0),)),
    "columns": ((4,), (Shard(1),)),
    "rows and columns": ((2, 2), (Shard(0), Shard(1))),
    "rows twice": ((2, 2), (Shard(0), Shard(0))),
    "replicas": ((2, 2), (Replicate(), Shard(0))),
    "everywhere whole": ((4,), (Replicate(),)),
}


def odd_tensors() -> dict[str, torch.Tensor]:
    """Tensors of other dtypes, shapes and strides."""
    numbers = torch.arange(-105, 105)
    return {
        "bf16": numbers.to(torch.bfloat16).view(15, 14),
        "fp8": numbers.float().view(15, 14).to(torch.float8_e4m3fn),
        "int8": numbers.to(torch.int8).view(7, 30),
        "int64": numbers.view(2, 3, 5, 7),
        "bool": (numbers % 3 == 0).view(10, 21),
        "few": torch.arange(3.0),  # some ranks have none of it
        "turned": numbers.double().view(15, 14).t(),
    }


def _spread(
    tensor: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> torch.Tensor:
    """A tensor that every rank has, as the ranks' parts of it; a vector by rows alone."""
    fitting = tuple(
        Shard(0) if isinstance(one, Shard) and one.dim >= tensor.dim() else one
        for one in placements
    )
    return distribute_tensor(tensor, mesh, fitting, src_data_rank=None)


def _module(weights: dict[str, torch.Tensor]) -> nn.Module:
    """Modules whose parameters have these names."""
    root = nn.Module()
    for name, tensor in weights.items():
        *path, leaf = name.split(".")
        at = root
        for part in path:
            if part not in at._modules:
                at.add_module(part, nn.Module())
            at = at.get_submodule(part)
        at.register_parameter(leaf, nn.Parameter(tensor.clone()))
    return root


def save_job(rank: Rank, *, folder: str) -> dict[str, Any]:
    """Save the same weights in every layout, under folders named as the layouts."""
    root = Path(folder)
    weights = llama_sd(**SIZES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, (shape, placements) in LAYOUTS.items():
            mesh = init_device_mesh("cpu", shape)
            state = {key: _spread(one, mesh, placements) for key, one in weights.items()}
            dcp.save(state, checkpoint_id=root / name)
        mesh = init_device_mesh("cpu", (WORLD,))
        odd = {key: _spread(one, mesh, (Shard(0),)) for key, one in odd_tensors().items()}
        writer = dcp.FileSystemWriter(root / "odd", thread_count=2)
        dcp.save({"model": odd}, storage_writer=writer)
        trained = _trained(weights, mesh)
        dcp.save(trained, checkpoint_id=root / "fsdp")
        done = dcp.async_save(trained, checkpoint_id=root / "asynchronous")
        done.result()
        state = {key: _spread(one, mesh, (Shard(0),)) for key, one in weights.items()}
        dcp.save(state, checkpoint_id=root / "alone", use_collectives=False)
        dist.barrier()
    return {"rank": dist.get_rank()}


def _trained(weights: dict[str, torch.Tensor], mesh: DeviceMesh) -> dict[str, Any]:
    """A model under ``fully_shard`` and its optimizer, as the guides of torch save them."""
    module: Any = _module(weights)
    for layer in module.model.layers.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.0, weight_decay=0.0)
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return {
        "model": get_model_state_dict(module),
        "optim": get_optimizer_state_dict(module, optimizer),
        "step": 7,
    }
