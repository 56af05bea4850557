"""What real ranks of a device mesh do in tests of ``load_into``; importable by their processes.

# B texts, T tokens, D width
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import loadkit
from loadkit.rank_worker import Rank

__all__ = ["IDS", "LAYOUTS", "Net", "hugging_face_job", "mesh_job"]

IDS = torch.arange(8)


class Net(nn.Module):
    """Sizes that no mesh here divides, but for the 10 that two tp ranks share."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """``[T]`` to ``[T, 11]``."""
        hidden = self.emb(ids)
        return self.head(self.norm(hidden + self.down(torch.relu(self.up(hidden)))))  # type: ignore[no-any-return]


def _tp(module: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _fsdp(module: Any, mesh: DeviceMesh) -> None:
    fully_shard(module.up, mesh=mesh)
    fully_shard(module, mesh=mesh)


def _both(module: nn.Module, mesh: DeviceMesh) -> None:
    _tp(module, mesh["tp"])
    _fsdp(module, mesh["dp"])


# name -> the mesh's shape, its dims' names, how a module is laid out over it
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[str, ...], Callable[[Any, DeviceMesh], None]]] = {
    "tp": ((4,), ("tp",), _tp),
    "fsdp": ((4,), ("dp",), _fsdp),
    "fsdp and tp": ((2, 2), ("dp", "tp"), _both),
    "hybrid": ((2, 2), ("replicas", "dp"), _fsdp),
}
COMPUTING = ("fsdp", "fsdp and tp", "hybrid")  # 10 features over 4 tp ranks: torch cannot


def mesh_job(rank: Rank, *, first: str, second: str) -> dict[str, Any]:
    """Every layout, made on meta and real: load, gather, compute, load another, gather again."""
    found: dict[str, Any] = {}
    for name, (shape, names, lay_out) in LAYOUTS.items():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for made_on in ("meta", "cpu"):
            with torch.device(made_on):
                module: Any = Net()
            lay_out(module, mesh)
            found[f"{name}, {made_on}"] = _loads(module, first, second, name in COMPUTING)
    return found


def _loads(module: Any, first: str, second: str, computes: bool) -> dict[str, Any]:
    result = loadkit.load_into(module, first)
    found = {
        "bytes": _bytes(result, module),
        "exact": {row.exact for row in result.plan.rows},
        "first": _gathered(module),
        "tied": module.head.weight is module.emb.weight,
    }
    if computes:
        with torch.no_grad():
            found["logits"] = module(IDS)
    loadkit.load_into(module, second)  # some parameters were gathered by the forward pass
    found["second"] = _gathered(module)
    return found


def _gathered(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter, whole, as ``fully_shard`` keeps it between passes."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    return {
        name: (param.full_tensor() if isinstance(param, DTensor) else param).detach().clone()
        for name, param in module.named_parameters()
    }


def _bytes(result: Any, module: nn.Module) -> dict[str, int]:
    """What was planned, needed and read, and what the local parts take."""
    return {
        "planned": result.plan.bytes_to_read,
        "needed": result.report.bytes_needed,
        "read": result.report.bytes_read,
        "local": sum(
            (param.to_local() if isinstance(param, DTensor) else param).numel() * param.itemsize
            for param in module.parameters()
        ),
    }


def hugging_face_job(rank: Rank, *, folder: str) -> dict[str, Any]:
    """A Hugging Face model made on meta, over FSDP and tp, loaded and run."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        module: Any = AutoModelForCausalLM.from_config(config).eval()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for layer in module.model.layers:
        plan = {
            "self_attn.q_proj": ColwiseParallel(),
            "self_attn.k_proj": ColwiseParallel(),
            "self_attn.v_proj": ColwiseParallel(),
            "self_attn.o_proj": RowwiseParallel(),
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(),
        }
        parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(module, mesh=mesh["dp"])
    result = loadkit.load_into(module, folder)
    found = {
        "bytes": _bytes(result, module),
        "first": _gathered(module),
    }
    with torch.no_grad():
        found["logits"] = module(IDS[None]).logits[0]
    return found
