"""``iter_weights``: a checkpoint's tensors one after the other, without a model."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from loadkit.execution import Target
from loadkit.failed_load import let_go
from loadkit.integrity import Verification
from loadkit.integrity.layer import tensors_of
from loadkit.load_strategy import reader_for
from loadkit.read import read_targets
from loadkit.read_ahead import read_ahead
from loadkit.readers.base import Place
from loadkit.readers.prefetch import PrefetchingReader
from loadkit.resolve import job_for_module
from loadkit.tracing.evaluate import strided
from loadkit.tracing.lazy_tensor import LazyTensor
from loadkit.tracing.program import resolve
from loadkit.tracing.storage import Storage, Unwritten
from loadkit.tracing.view import contiguous
from loadkit.unused_options import refuse_idle_ring

if TYPE_CHECKING:
    from loadkit.config import LoadConfig
    from loadkit.readers.base import Reader
    from loadkit.resolve import Job

__all__ = ["iter_weights"]


def iter_weights(
    source: str | os.PathLike[str],
    *,
    load_format: str = "auto",
    load_config: LoadConfig | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a checkpoint, by its checkpoint name, one in memory at a time.

    With ``enable_multithread_load`` in ``model_loader_extra_config`` threads make tensors ahead of
    the caller, in the same order; those not taken yet stay within ``byte_budget``. Closing the
    iterator early ends the threads.

    Args:
        source: a folder, a file or a URI; no config.json is needed.
        load_format: "auto" or a name of ``loadkit formats``.
        load_config: how it is read; its ``alias`` does not count.

    Yields:
        (name, tensor) in file order; the tensor has the file's shape and dtype, on the CPU, in
        memory of its own.

    Raises:
        IntegrityError: ``verify`` found a file that does not hold what it should; a tensor is
            compared before it is handed out.
        LoadkitError: the source or its headers are refused, a read failed, or a file changed.
    """
    job = job_for_module(nn.Module(), source, load_format=load_format, load_config=load_config)
    readers: list[Reader] = []
    before = sys.exception()
    try:
        refuse_idle_ring(job.load_config)
        job.source.make_local(job.loader.files)
        ahead = job.loader.multithread
        config = replace(job.load_config, alias="never")
        if ahead is not None:
            config = replace(config, num_threads=1)  # of each read; tensors are read side by side
        reader = _reader(job, config)
        readers.append(reader)
        weights = job.loader.catalogue(job.config.model_config)
        if ahead is None:
            for name, tensor in weights:
                yield name, _in_memory(tensor, name, reader)
        else:
            threads = ahead.threads if reader.concurrent else 1
            make = partial(_pair, reader)
            yield from read_ahead(weights, [make] * threads, _nbytes, ahead.byte_budget)
        reader.end()
    except Exception as error:
        let_go(error, before)
        raise
    finally:
        for reader in readers:
            reader.close()
        job.close()


def _reader(job: Job, load_config: LoadConfig) -> Reader:
    """What reads, verifies and warms the files, forward and tensor by tensor."""
    loader, model_config = job.loader, job.config.model_config
    files = [job.source.open(name) for name in loader.files]
    check = Verification(loader, load_config, model_config, files)
    reader = reader_for(load_config, files, "cpu").reader
    if isinstance(reader, PrefetchingReader):
        for file, start, end, name in tensors_of(loader.catalogue(model_config)):
            reader.survey([Place(file, start, end - start, 1, end - start, name)])
    reader = check.around(reader)
    reader.streaming = True
    return reader


def _nbytes(named: tuple[str, torch.Tensor]) -> int:
    return named[1].numel() * named[1].dtype.itemsize


def _pair(reader: Reader, named: tuple[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
    name, tensor = named
    return name, _in_memory(tensor, name, reader)


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
