"""Tensors stored in blocks (GGUF and its like): lazy, read by blocks, decoded when they are used.

An encoded tensor is the deferred decoding of a tensor of bytes. A region asked of it is asked of
the blocks that hold it: rows are byte ranges, columns are whole blocks.
"""

from __future__ import annotations

from math import prod

import torch

from loadkit.errors import ModelError
from loadkit.tensor_info import TensorInfo
from loadkit.text import printable
from loadkit.tracing.blocks import DecodeBlocks, Encoding, blocks_of
from loadkit.tracing.lazy_tensor import LazyTensor, leaf_names
from loadkit.tracing.storage import Operation, Storage, Value
from loadkit.tracing.view import Inside, contiguous, relate

__all__ = ["Encoding", "encoded_lazy", "encoding_of", "packed"]


def encoded_lazy(info: TensorInfo, encoding: Encoding, size: tuple[int, ...]) -> LazyTensor:
    """The float32 lazy tensor [*size] that bytes stand for. No byte is read.

    Args:
        info: the bytes: dtype U8, shape (*size[:-1], bytes of a row).
        encoding: how a row is stored.
        size: the tensor's size in elements; the last one is a multiple of the block.

    Raises:
        ModelError: the sizes do not fit the encoding.
    """
    rows = (*size[:-1], size[-1] // encoding.block * encoding.block_bytes)
    if not size or size[-1] % encoding.block or tuple(info.shape) != rows:
        raise ModelError(
            f"tensor {printable(info.name)} of size {list(size)} cannot be {encoding.name} in "
            f"{list(info.shape)} bytes: a block is {encoding.block} elements in "
            f"{encoding.block_bytes} bytes",
            tensor=info.name,
            file=info.file.name,
        )
    stored = Storage.of_info(info)
    value = Value(stored, 0, contiguous(rows, 1), torch.uint8)
    view = contiguous(size, torch.float32.itemsize)
    decode = Operation(DecodeBlocks(encoding), (value,), {}, None, view, torch.float32)
    return LazyTensor(Storage(decode, prod(size), view.itemsize), view, torch.float32)


def encoding_of(tensor: torch.Tensor) -> Encoding | None:
    """The encoding behind a lazy tensor (a view of it too), or None."""
    if not isinstance(tensor, LazyTensor) or tensor.lazy_storage.writes:
        return None
    base = tensor.lazy_storage.base
    if isinstance(base, Operation) and isinstance(base.func, DecodeBlocks):
        return base.func.encoding
    return None


def packed(tensor: torch.Tensor) -> LazyTensor:
    """The bytes behind a view of an encoded tensor: uint8 [..., bytes of a row].

    Raises:
        ModelError: BLOCK_MISALIGNED, the view begins or ends inside a block, or its last dimension
            is not the encoded one, or the tensor is not encoded at all.
    """
    encoding = encoding_of(tensor)
    if encoding is None or not isinstance(tensor, LazyTensor):
        raise ModelError("only a tensor stored in blocks has packed bytes")
    base = tensor.lazy_storage.base
    relation = relate(base.view, tensor.lazy_view) if isinstance(base, Operation) else None
    if isinstance(relation, Inside) and isinstance(base, Operation):
        blocks = blocks_of(base, relation)
        if blocks.aligned and relation.size == tuple(tensor.size()):
            value = base.args[0]
            return LazyTensor(value.storage, blocks.source, torch.uint8)
    name = next(iter(sorted(leaf_names(tensor.lazy_value()))), None)
    raise ModelError(
        f"a part of {printable(name)} begins or ends inside a block of {encoding.block} "
        f"{encoding.name} elements",
        code="BLOCK_MISALIGNED",
        tensor=name,
        detail={"block": encoding.block},
    )
