"""Saving and loading the ranks of a topology in one process, and manifests that lie."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import loadkit
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.manifest import MANIFEST

__all__ = ["QUIET", "edit_manifest", "ranks_of", "same_state", "save_ranks", "state"]

QUIET = LoadConfig(use_tqdm_on_load=False)


def ranks_of(**sizes: Any) -> list[ParallelConfig]:
    """Every rank of a topology."""
    world = sizes.get("tp_size", 1) * sizes.get("pp_size", 1) * sizes.get("dp_size", 1)
    return [ParallelConfig.for_rank(rank, **sizes) for rank in range(world)]


def save_ranks(source: Path, folder: Path, ranks: list[ParallelConfig], **load: Any) -> list[Any]:
    """Load every rank of a source and save it; returns the models."""
    saving = load.pop("saving", {})
    models = []
    for parallel in ranks:
        model = loadkit.load_model(source, parallel=parallel, load_config=QUIET, **load)
        report = loadkit.save(model, folder, save_format="sharded_state", **saving)
        models.append(model)
    assert report.missing_ranks == ()
    return models


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer, under every name."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def same_state(found: nn.Module, expected: nn.Module) -> None:
    """The same names, dtypes, shapes and bits."""
    mine, theirs = state(found), state(expected)
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert mine[name].dtype == tensor.dtype and mine[name].shape == tensor.shape, name
        a, b = (t.detach().reshape(-1).view(torch.uint8) for t in (mine[name], tensor))
        assert torch.equal(a, b), name


def edit_manifest(folder: Path, edit: Callable[[Any], None]) -> None:
    """Change a manifest's JSON."""
    content = json.loads((folder / MANIFEST).read_text())
    edit(content)
    (folder / MANIFEST).write_text(json.dumps(content))
