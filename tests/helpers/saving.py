"""Small saved folders that show which save they are of, and system calls that fail."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import loadkit

__all__ = ["HIDDEN", "Fault", "Tensors", "contents", "model_of", "number_in", "old_folder", "read"]
__all__ += ["same", "same_models", "save_number"]

HIDDEN = ".loadkit-save-"
Tensors = dict[str, torch.Tensor]


def read(folder: Path) -> Tensors:
    """Every tensor of a folder's safetensors, by the safetensors library."""
    found: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def same(found: Tensors, expected: Tensors) -> None:
    """The same names, dtypes and bits."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        a, b = (t.reshape(-1).view(torch.uint8) for t in (found[name], tensor))
        assert torch.equal(a, b), name


def same_models(a: nn.Module, b: nn.Module) -> None:
    """The same parameters."""
    same(
        {n: p.data.contiguous() for n, p in a.named_parameters()},
        {n: p.data.contiguous() for n, p in b.named_parameters()},
    )


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones too."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if not p.is_dir()}


def model_of(number: float, size: int = 64) -> nn.Module:
    """A module whose every number is ``number``."""
    model = nn.Sequential(*(nn.Linear(size, size) for _ in range(3)))
    for param in model.parameters():
        nn.init.constant_(param, number)
    return model


def save_number(number: float, path: Path, **options: Any) -> None:
    """Save ``model_of(number)``, the number in its config too."""
    config = {"architectures": ["X"], "number": number}
    loadkit.save(model_of(number), path, config=config, **options)


def number_in(folder: Path) -> float:
    """The one number that a saved folder holds, config, index and weights."""
    number: float = json.loads((folder / "config.json").read_text())["number"]
    files = sorted(folder.glob("model*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        named = set(json.loads(index.read_text())["weight_map"].values())
        assert named == {file.name for file in files}
    tensors = {name: t for file in files for name, t in load_file(file).items()}
    assert len(tensors) == 6
    assert all(bool((t == number).all()) for t in tensors.values())
    return number


def old_folder(folder: Path) -> Path:
    """A folder that was saved before, in shards, with somebody's notes in it."""
    save_number(1.0, folder, max_shard_bytes=20_000)
    (folder / "notes/deep").mkdir(parents=True)
    (folder / "notes/deep/mine.txt").write_text("keep me")
    (folder / "link").symlink_to("notes/deep")
    return folder


class Fault:
    """Makes the n-th call of something in ``os`` fail with an errno; counts the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, number: int, at: int) -> None:
        self.calls, self.hit = 0, False
        real: Callable[..., Any] = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == at:
                self.hit = True
                raise OSError(number, os.strerror(number))
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, call)
