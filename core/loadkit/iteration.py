"""``iter_weights``: a checkpoint's tensors one after the other, without a model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from loadkit.execution import Target
from loadkit.read import read_targets
from loadkit.readers import choose_reader
from loadkit.resolve import job_for_module
from loadkit.tracing.evaluate import strided
from loadkit.tracing.lazy_tensor import LazyTensor
from loadkit.tracing.program import resolve
from loadkit.tracing.storage import Storage, Unwritten
from loadkit.tracing.view import contiguous

if TYPE_CHECKING:
    from loadkit.config import LoadConfig
    from loadkit.readers.base import Reader

__all__ = ["iter_weights"]


def iter_weights(
    source: str | os.PathLike[str],
    *,
    load_format: str = "auto",
    load_config: LoadConfig | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a checkpoint, by its checkpoint name, one in memory at a time.

    Args:
        source: a folder, a file or a URI; no config.json is needed.
        load_format: "auto" or a name of ``loadkit formats``.
        load_config: how it is read; its ``alias`` does not count.

    Yields:
        (name, tensor) in file order; the tensor has the file's shape and dtype, on the CPU, in
        memory of its own.

    Raises:
        LoadkitError: the source or its headers are refused, a read failed, or a file changed.
    """
    job = job_for_module(nn.Module(), source, load_format=load_format, load_config=load_config)
    reader = choose_reader(replace(job.load_config, alias="never"), (), "cpu").reader
    try:
        for name, tensor in job.loader.catalogue(job.config.model_config):
            yield name, _in_memory(tensor, name, reader)
    finally:
        reader.close()
        job.close()


def _in_memory(tensor: torch.Tensor, name: str, reader: Reader) -> torch.Tensor:
    """A catalogue's tensor with its numbers, read as those of a parameter are."""
    if not isinstance(tensor, LazyTensor):
        return tensor
    view = contiguous(tuple(tensor.size()), tensor.dtype.itemsize)
    storage = Storage(Unwritten(name), view.numel, view.itemsize)
    pieces = [(view, resolve(tensor.lazy_value()))]
    target = Target((name,), storage, view, tensor.dtype, False, pieces)
    _, memory = read_targets([target], reader, device=torch.device("cpu"), alias=False)
    flat = memory.get(id(storage), torch.empty(0, dtype=tensor.dtype))
    return strided(flat, view, tensor.dtype)
