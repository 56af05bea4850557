"""Two real ranks that load a checkpoint and compute with it; importable, so it can be spawned."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.multiprocessing.spawn import spawn

import loadkit
from loadkit.config import LoadConfig, ParallelConfig
from loadkit_layers.communication import init_parallel_groups

__all__ = ["compute", "two_ranks"]


def compute(folder: Path, parallel: ParallelConfig, alias: str) -> dict[str, torch.Tensor]:
    """Load one rank and run eleven tokens: hidden states [T, D], and what the load read."""
    result = loadkit.load(folder, parallel=parallel, load_config=LoadConfig(alias=alias))
    model: Any = result.model
    ids = torch.arange(11) % 29
    with torch.inference_mode():
        hidden = model(ids, torch.arange(11))
        out = {"hidden": hidden.clone()}
        if hasattr(model, "compute_logits"):
            out["logits"] = model.compute_logits(hidden).clone()
    out["bytes"] = torch.tensor([result.plan.bytes_to_read, result.report.bytes_read])
    return out


def two_ranks(
    folder: Path, into: Path, aliases: Sequence[str]
) -> dict[str, list[dict[str, torch.Tensor]]]:
    """The same on two gloo ranks, each in a process of its own, for each alias."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    spawn(_rank, args=(folder, into, aliases, store.port), nprocs=2)
    return {
        alias: [load_file(into / f"{alias}{rank}.st") for rank in range(2)] for alias in aliases
    }


def _rank(rank: int, folder: Path, into: Path, aliases: Sequence[str], port: int) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        parallel = ParallelConfig(tp_size=2, tp_rank=rank)
        init_parallel_groups(parallel)
        for alias in aliases:
            save_file(compute(folder, parallel, alias), into / f"{alias}{rank}.st")
        dist.barrier()
    finally:
        dist.destroy_process_group()
