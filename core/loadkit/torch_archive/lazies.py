"""Tensors of an archive that are not simply their bytes in order: strided ones, big-endian ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from loadkit.tensor_info import TensorInfo, torch_dtype
from loadkit.tracing.blocks import DecodeBlocks
from loadkit.tracing.lazy_tensor import LazyTensor, lazy_from_info
from loadkit.tracing.storage import FileLeaf, Operation, Storage, Unwritten, Value, Write
from loadkit.tracing.view import View, contiguous

__all__ = ["OddTensor", "Swapped"]


@dataclass(frozen=True, slots=True)
class Swapped:
    """Elements whose bytes are stored in the other order.

    Attributes:
        dtype: of the elements.
        unit: bytes that are turned around together: of a complex number, each half.
    """

    dtype: torch.dtype
    unit: int

    @property
    def name(self) -> str:
        """For people."""
        return f"big-endian {str(self.dtype).removeprefix('torch.')}"

    @property
    def block(self) -> int:
        """One element."""
        return 1

    @property
    def block_bytes(self) -> int:
        """Its bytes."""
        return self.dtype.itemsize

    def decode(self, packed: torch.Tensor) -> torch.Tensor:
        """uint8 [..., n * itemsize] -> [..., n] of the dtype."""
        width = packed.shape[-1] // self.unit
        turned: torch.Tensor = packed.unflatten(-1, (width, self.unit)).flip(-1).flatten(-2)
        return turned.view(self.dtype)

    def decode_into(self, packed: torch.Tensor, out: torch.Tensor) -> object:
        """The same into ``out``, cast to its dtype."""
        return out.copy_(self.decode(packed))


@dataclass(frozen=True, slots=True)
class OddTensor:
    """A tensor that is strided, big-endian, or both.

    Attributes:
        info: its name, dtype and shape; ``offset`` is its first byte, ``nbytes`` reaches to its
            last.
        stride: in elements; None: row-major.
        big: whether its bytes are in big-endian order.
    """

    info: TensorInfo
    stride: tuple[int, ...] | None
    big: bool

    def tensor(self) -> LazyTensor:
        """It, lazily: row-major, whatever its strides in the file are.

        Raises:
            FormatError: E_DTYPE, this torch lacks the dtype.
        """
        size, dtype = self.info.shape, torch_dtype(self.info.dtype)
        if self.stride is None and not self.big:
            return lazy_from_info(self.info)
        if self.stride is None and size:
            return LazyTensor(self._stored(size), contiguous(size, dtype.itemsize), dtype)
        flat = self._stored((self.info.nbytes // dtype.itemsize,))
        stride = contiguous(size, 1).stride if self.stride is None else self.stride
        shown = Value(flat, 0, View(size, stride, 0, dtype.itemsize), dtype)
        view = contiguous(size, dtype.itemsize)
        made = Storage(Unwritten(self.info.name), view.numel, dtype.itemsize, scratch=True)
        made.writes.append(Write(view, dtype, shown))
        return LazyTensor(made, view, dtype)

    def _stored(self, size: tuple[int, ...]) -> Storage:
        """The elements as they lie in the file, in the machine's byte order."""
        info, dtype = self.info, torch_dtype(self.info.dtype)
        view = contiguous(size, dtype.itemsize)
        if not self.big:
            return Storage(FileLeaf(info, info.name, info.shape, dtype), view.numel, dtype.itemsize)
        rows = (*size[:-1], size[-1] * dtype.itemsize)
        leaf = FileLeaf(info, info.name, rows, torch.uint8)
        stored = Value(Storage.of_leaf(leaf), 0, contiguous(rows, 1), torch.uint8)
        swap = Swapped(dtype, dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize)
        decode = Operation(DecodeBlocks(swap), (stored,), {}, None, view, dtype)
        return Storage(decode, view.numel, dtype.itemsize)
