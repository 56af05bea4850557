"""Checkpoints of torch.distributed.checkpoint that lie: a small one, and ways to spoil it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from helpers.dcp_files import write_dcp
from loadkit.config import LoadConfig
from loadkit.errors import FormatError, LoadkitError
from loadkit.sources.local import LocalSource
from loadkit_dcp.checkpoint import open_checkpoint

__all__ = ["MARKER", "NAME", "Change", "Runs", "chunks", "opened", "place_of", "refused", "small"]

Change = Callable[[Metadata], None]
NAME = "model.w"
MARKER = "loadkit-was-run"


def small(folder: Path) -> Path:
    """A tensor of 12 elements, a second one, and a number."""
    state = {"w": torch.arange(12.0).view(3, 4), "x": torch.ones(5)}
    return write_dcp(folder, {"model": state, "step": 3})


def opened(folder: Path) -> Any:
    """What the loader sees of a folder."""
    with LocalSource(folder, LoadConfig()) as source:
        return open_checkpoint(source, None)


def refused(folder: Path, kind: type[LoadkitError] = FormatError) -> Any:
    """The error that a folder comes to, which names its file and says what to do."""
    with pytest.raises(kind) as caught:
        opened(folder)
    error: Any = caught.value
    assert error.file is not None
    assert error.hint
    return error


def place_of(metadata: Metadata, name: str = NAME) -> Any:
    """Where the metadata says a tensor lies."""
    return next(place for key, place in metadata.storage_data.items() if key.fqn == name)


class Runs:
    """Pickled, it is a call."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], tuple(self.call[1:])


def chunks(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Change:
    """Other boxes, each said to lie where the whole is."""

    def change(metadata: Metadata) -> None:
        place = place_of(metadata)
        entry: Any = metadata.state_dict_metadata[NAME]
        entry.chunks = [
            ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in boxes
        ]
        for at, _ in boxes:
            metadata.storage_data[MetadataIndex(NAME, at)] = place

    return change
