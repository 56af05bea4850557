"""Folders of torch.distributed.checkpoint: written by torch in this process, edited by a test."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

__all__ = ["edited", "read_back", "write_dcp"]


def write_dcp(folder: Path, state: Mapping[str, Any], **writer: Any) -> Path:
    """Save a state dict as torch does in one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process only
        dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(folder, **writer), no_dist=True)
    return folder


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

    def __init__(self, folder: Path) -> None:
        self.path = folder / ".metadata"

    def __enter__(self) -> Metadata:
        self.metadata: Metadata = pickle.loads(self.path.read_bytes())
        return self.metadata

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.path.write_bytes(pickle.dumps(self.metadata))
