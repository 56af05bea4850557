"""``GGUFEncoding``: blocks of bytes into numbers, in pieces that fit a cache, on several threads.

A kernel turns ``[N, bytes of a block]`` into float32 ``[N, elements of a block]``; everything about
strides, dtypes, pieces and threads is here. N blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from loadkit.errors import ModelError
from loadkit.readers.threads import default_threads, run_tasks

__all__ = ["PIECE", "GGUFEncoding", "Kernel", "one_thread_per_operation"]

Kernel = Callable[[torch.Tensor, torch.Tensor], None]
"""``kernel(packed, out)``: uint8 [N, block_bytes], contiguous, begins at a multiple of 4 bytes of
its storage; into float32 [N, block], contiguous."""

PIECE = 1 << 18  # elements decoded at a time: 1 MiB of float32, so that they stay in a cache
_PARALLEL = 1 << 22  # elements from which threads are worth starting
_MAX_THREADS = 8
_OUT = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class GGUFEncoding:
    """One ggml type: how its blocks become numbers.

    Attributes:
        name: ggml's name of the type.
        block: elements of one block; they lie along a tensor's last dimension.
        block_bytes: bytes of one block.
        kernel: decodes whole blocks.
    """

    name: str
    block: int
    block_bytes: int
    kernel: Kernel

    def decode(self, packed: torch.Tensor) -> torch.Tensor:
        """The numbers of whole blocks: uint8 [..., n * block_bytes] to float32 [..., n * block].

        Bit for bit what ggml's C code gives. Any strides.

        Raises:
            ModelError: the last dimension does not hold whole blocks, or it is not uint8.
        """
        size = (*packed.shape[:-1], self._blocks(packed) * self.block)
        out = torch.empty(size, dtype=torch.float32)
        self.decode_into(packed, out)
        return out

    def decode_into(self, packed: torch.Tensor, out: torch.Tensor) -> None:
        """The same into existing CPU memory of float32, bfloat16 or float16, of any strides.

        Numbers are decoded as float32 and rounded to nearest-even then.

        Raises:
            ModelError: sizes or dtypes do not fit.
        """
        size = (*packed.shape[:-1], self._blocks(packed) * self.block)
        if tuple(out.shape) != size or out.dtype not in _OUT:
            raise ModelError(
                f"{self.name} blocks of {list(packed.shape)} bytes decode to {list(size)} numbers; "
                f"the memory given is {out.dtype} {list(out.shape)}"
            )
        if out.numel() == 0:
            return
        with torch.no_grad(), one_thread_per_operation():
            tasks = (lambda p=p, o=o: self._piece(p, o) for p, o in self._pieces(packed, out))
            threads = 1 if out.numel() < _PARALLEL else default_threads(0, _MAX_THREADS)
            run_tasks(tasks, threads)

    def _blocks(self, packed: torch.Tensor) -> int:
        """Blocks along the last dimension."""
        whole, rest = divmod(packed.shape[-1] if packed.dim() else 0, self.block_bytes)
        if packed.dtype != torch.uint8 or not packed.dim() or rest:
            raise ModelError(
                f"{self.name} is stored in blocks of {self.block_bytes} bytes; found "
                f"{packed.dtype} {list(packed.shape)}"
            )
        return whole

    def _pieces(
        self, packed: torch.Tensor, out: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Both cut alike: pieces of about ``PIECE`` elements, whole rows unless rows are long."""
        if packed.is_contiguous() and out.is_contiguous():
            flat, into = packed.view(-1, self.block_bytes), out.view(-1, self.block)
            step = max(1, PIECE // self.block)
            for at in range(0, flat.shape[0], step):
                yield flat[at : at + step], into[at : at + step]
        elif packed.dim() == 1:
            step = max(1, PIECE // self.block)
            for at in range(0, out.shape[0] // self.block, step):
                stop = at + step
                yield (
                    packed[at * self.block_bytes : stop * self.block_bytes],
                    out[at * self.block : stop * self.block],
                )
        elif packed.dim() > 2 or out.shape[-1] >= PIECE:
            for inner, into in zip(packed, out, strict=True):
                yield from self._pieces(inner, into)
        else:
            step = PIECE // out.shape[-1]
            for at in range(0, out.shape[0], step):
                yield packed[at : at + step], out[at : at + step]

    def _piece(self, packed: torch.Tensor, out: torch.Tensor) -> int:
        """Decode one piece; its elements."""
        blocks = packed.contiguous().view(-1, self.block_bytes)
        if blocks.storage_offset() % 4:  # scales are read as 16- and 32-bit numbers
            blocks = blocks.clone()
        if out.dtype == torch.float32 and out.is_contiguous():
            self.kernel(blocks, out.view(-1, self.block))
        else:
            made = torch.empty(blocks.shape[0], self.block)
            self.kernel(blocks, made)
            out.copy_(made.view(out.shape))
        return out.numel()


_lock = threading.Lock()
_inside = 0
_threads_before = 1


@contextmanager
def one_thread_per_operation() -> Iterator[None]:
    """Torch operations of this block, and of threads started in it, run on their own thread only.

    Pieces are too small to be worth splitting: where cores are shared, waiting for torch's own
    threads costs ten times the work.
    """
    global _inside, _threads_before
    with _lock:
        if not _inside:
            _threads_before = torch.get_num_threads()
        _inside += 1
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            torch.set_num_threads(_threads_before)
