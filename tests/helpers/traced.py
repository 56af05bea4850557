"""Small models with a loader of the test's own, through the whole line or the recorder alone."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import loadkit
from helpers.checkpoints import write_cfg, write_st
from loadkit.config import LoadConfig
from loadkit.load_plan import LoadPlan
from loadkit.loader import LoadResult
from loadkit.model_registry import ModelRegistry

Tensor = torch.Tensor
Weights = Iterable[tuple[str, Tensor]]
LoadWeights = Callable[[nn.Module, Weights], Any]
Init = Callable[[nn.Module], None]


def model_class(
    params: Mapping[str, Tensor], load: LoadWeights, init: Init | None = None
) -> type[nn.Module]:
    """A model with parameters like those tensors (and what ``init`` adds) and that loader."""

    class Tiny(nn.Module):
        def __init__(self, *, config: Any, prefix: str = "") -> None:
            super().__init__()
            for name, like in params.items():
                param = nn.Parameter(torch.empty(like.shape, dtype=like.dtype), requires_grad=False)
                self.register_parameter(name, param)
            if init is not None:
                init(self)

        def load_weights(self, weights: Weights) -> set[str]:
            load(self, weights)
            return set()

    return Tiny


class Checkpoint:
    """A folder with one file, and a model that loads it."""

    def __init__(
        self,
        folder: Path,
        weights: Mapping[str, Tensor],
        params: Mapping[str, Tensor],
        load: LoadWeights,
        init: Init | None = None,
    ) -> None:
        self.folder = folder
        self.architecture = f"Tiny{uuid.uuid4().hex[:8]}"
        ModelRegistry.register_model(self.architecture, model_class(params, load, init))
        write_cfg(folder, architectures=[self.architecture])
        write_st(folder / "model.safetensors", dict(weights))

    def plan(self, **options: Any) -> LoadPlan:
        return loadkit.plan(self.folder, **options)

    def load(self, reader: str = "pread", **options: Any) -> LoadResult:
        config = LoadConfig(reader=reader, use_tqdm_on_load=False)
        return loadkit.load(self.folder, load_config=config, **options)


def each(place: Callable[[nn.Module, str, Tensor], Any]) -> LoadWeights:
    """A loader that gives every tensor to ``place(model, name, tensor)``."""

    def load(model: nn.Module, weights: Weights) -> None:
        for name, tensor in weights:
            place(model, name, tensor)

    return load


def codes(plan: LoadPlan) -> list[str]:
    return [problem.code for problem in plan.problems]


def words(plan: LoadPlan) -> dict[str, str]:
    """How exactly each tensor is read."""
    return {row.tensor: row.exact for row in plan.rows if row.tensor}
