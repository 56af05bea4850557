"""A checkpoint with one of each way that bytes can go to a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from helpers.traced import Checkpoint, Tensor, each

__all__ = ["PARAMS", "expected", "large", "large_weights", "place_large", "random_tensor"]


def random_tensor(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*size, generator=generator).to(dtype)


def large_weights() -> dict[str, Tensor]:
    """Tensors that take several slots of 64 KiB each."""
    return {
        "cast": random_tensor(300, 301, dtype=torch.bfloat16, seed=1),
        "columns": random_tensor(700, 256, seed=2),
        "far": random_tensor(40, 9000, seed=3),
        "gate": random_tensor(256, 300, seed=4),
        "long": random_tensor(3, 60_000, seed=5),
        "norm": random_tensor(301, seed=6),
        "plain": random_tensor(123, 457, seed=7),
        "turned": random_tensor(400, 300, seed=8),
        "up": random_tensor(256, 300, seed=9),
    }


PARAMS = {
    "cast": torch.zeros(300, 301),
    "columns": torch.zeros(700, 64),  # rows of 256 bytes every 1,024: read with their gaps
    "far": torch.zeros(40, 3000),  # rows of 12,000 bytes every 36,000: each by itself
    "fused": torch.zeros(512, 300),
    "interleaved": torch.zeros(256, 2, 300),  # rows that lie apart on the device
    "long": torch.zeros(3, 50_000),  # a row is longer than a slot
    "norm": torch.zeros(320),
    "plain": torch.zeros(123, 457),
    "turned": torch.zeros(300, 400, dtype=torch.bfloat16),
}


def place_large(model: Any, name: str, w: Tensor) -> None:
    """One of each way bytes can go to a device."""
    p = {key: param.data for key, param in model.named_parameters()}
    if name == "columns":
        p[name].copy_(w[:, 64:128])
    elif name == "far":
        p[name].copy_(w[:, 3000:6000])
    elif name in ("gate", "up"):
        half = int(name == "up")
        p["fused"].narrow(0, 256 * half, 256).copy_(w)
        p["interleaved"][:, half].copy_(w)
    elif name == "long":
        p[name].copy_(w[:, 5000:55_000])
    elif name == "norm":
        p[name][301:].fill_(0.5)
        p[name][:301].copy_(w * 2)
    elif name == "turned":
        p[name].copy_(w.t())
    else:
        p[name].copy_(w)


def large(folder: Path) -> Checkpoint:
    return Checkpoint(folder, large_weights(), PARAMS, each(place_large))


def expected() -> dict[str, Tensor]:
    model = nn.Module()
    for name, like in PARAMS.items():
        model.register_parameter(name, nn.Parameter(like.clone(), requires_grad=False))
    for name, w in large_weights().items():
        place_large(model, name, w)
    return dict(model.state_dict())
