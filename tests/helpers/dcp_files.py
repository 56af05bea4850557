"""Folders of torch.distributed.checkpoint: written by torch in this process, edited by a test."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from helpers.checkpoints import write_cfg
from loadkit.testing import write_checkpoint
from loadkit.testing.loader_case import bits

__all__ = [
    "CONFIG",
    "SIZES",
    "check_equal",
    "edited",
    "plain_folder",
    "read_back",
    "trainer_folder",
    "write_dcp",
]

SIZES = {"hidden": 48, "heads": 6, "kv_heads": 3, "ffn": 96, "vocab": 120}
CONFIG = {
    "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3,
    "intermediate_size": 96, "vocab_size": 120,
}  # fmt: skip


def write_dcp(folder: Path, state: Mapping[str, Any], **writer: Any) -> Path:
    """Save a state dict as torch does in one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process only
        dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(folder, **writer), no_dist=True)
    return folder


def plain_folder(folder: Path, weights: Mapping[str, torch.Tensor], **config: Any) -> Path:
    """The same weights as safetensors."""
    folder.mkdir(exist_ok=True)
    write_cfg(folder, **{**CONFIG, **config})
    values = json.loads((folder / "config.json").read_text())
    return write_checkpoint(folder, weights, values)


def trainer_folder(folder: Path, weights: Mapping[str, torch.Tensor]) -> Path:
    """A model's dict beside an optimizer's, and a number."""
    optim = {"state": {name: {"exp_avg": one} for name, one in weights.items()}}
    write_dcp(folder, {"model": dict(weights), "optim": optim, "step": 3})
    write_cfg(folder, **CONFIG)
    return folder


def check_equal(found: nn.Module, wanted: nn.Module) -> None:
    """Every parameter, bit for bit."""
    theirs = dict(wanted.named_parameters())
    assert len(theirs) == len(list(found.parameters()))
    for name, param in found.named_parameters():
        assert torch.equal(bits(param), bits(theirs[name])), name


def read_back(folder: Path, like: Mapping[str, torch.Tensor], key: str = "") -> dict[str, Any]:
    """A folder's tensors as torch reads them, into new ones like those."""
    empty = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    state: dict[str, Any] = {key: empty} if key else empty
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return dict(state[key] if key else state)


class edited:
    """The metadata of a folder, to be changed inside of a ``with`` and written back after it."""

    def __init__(self, folder: Path, protocol: int | None = None) -> None:
        self.path, self.protocol = folder / ".metadata", protocol

    def __enter__(self) -> Metadata:
        self.metadata: Metadata = pickle.loads(self.path.read_bytes())
        return self.metadata

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.path.write_bytes(pickle.dumps(self.metadata, self.protocol))
