"""Real memory behind recorded storages, and numbers that are asked for while tracing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from loadkit.tracing.evaluate import evaluate, generate
from loadkit.tracing.expressions import Src
from loadkit.tracing.program import resolve, sources_of
from loadkit.tracing.storage import PARAMETER, Constant, FileLeaf, Storage, Unwritten, Value
from loadkit.tracing.view import View

if TYPE_CHECKING:
    from loadkit.tracing.recorder import Recorder

__all__ = ["DataRead", "all_of", "fetch_from_files", "read_now", "settled", "storage_of_plain"]


@dataclass(frozen=True, slots=True)
class DataRead:
    """Numbers that loader code asked for while it was traced: from which tensor, how many bytes."""

    tensor: str
    nbytes: int


def storage_of_plain(tensor: torch.Tensor) -> Storage:
    """A plain tensor's storage as a recorded one: real numbers, or nothing yet on meta."""
    kept = tensor.untyped_storage()
    size = tensor.dtype.itemsize
    numel = kept.nbytes() // size
    if tensor.device.type == "meta":
        return Storage(Unwritten(PARAMETER), numel, size, keep=kept)
    with torch.no_grad():
        flat = tensor.detach().as_strided((numel,), (1,), 0)
    return Storage(Constant(flat), numel, size, keep=kept, real=flat)


def all_of(storage: Storage) -> View:
    """All of a storage's elements, flat."""
    return View((storage.numel,), (1,), 0, storage.itemsize)


def settled(storage: Storage) -> Storage:
    """Real memory to which recorded values were written, with them in it."""
    value = Value(storage, len(storage.writes), all_of(storage), _bits_dtype(storage))
    numbers = read_now(value, None)
    real = storage.real
    assert real is not None and isinstance(storage.base, Constant)  # noqa: PT018, S101
    storage.base = Constant(storage.base.flat.clone(), storage.base.source)
    real.view(numbers.dtype).copy_(numbers)
    return Storage(Constant(real), storage.numel, storage.itemsize, keep=storage.keep, real=real)


def _bits_dtype(storage: Storage) -> torch.dtype:
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return sizes.get(storage.itemsize, torch.complex128)


def read_now(value: Value, recorder: Recorder | None) -> torch.Tensor:
    """A value's numbers, read now: exactly the regions that it is made of."""
    with torch._C.DisableTorchFunction():
        expr = resolve(value)
        fetch = recorder.fetch if recorder is not None else fetch_from_files
        if recorder is not None:
            for src in sources_of(expr):
                if isinstance(src, Src):
                    nbytes = src.view.numel * src.view.itemsize
                    recorder.data_reads.append(DataRead(src.leaf.name, nbytes))
        return evaluate(expr, fetch).clone()


def fetch_from_files(src: Src) -> torch.Tensor:
    """A leaf's region by the file's own ``read``: for the few numbers asked for while tracing."""
    leaf = src.leaf
    if not isinstance(leaf, FileLeaf):
        return generate(leaf, src)
    low, high = src.view.span()
    data = bytearray(leaf.info.file.read(leaf.info.offset + low, high - low))
    if not data:
        return torch.empty(src.size, dtype=src.dtype)
    flat = torch.frombuffer(data, dtype=torch.uint8).view(src.dtype)
    return flat.as_strided(
        src.view.size, src.view.stride, src.view.offset - low // src.view.itemsize
    )
