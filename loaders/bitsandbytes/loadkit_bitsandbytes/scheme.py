"""How a matrix is quantised to 4 bits, and the two codes of the library."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

__all__ = ["BLOCKSIZES", "CODES", "DTYPES", "NESTED_BLOCKSIZE", "Scheme"]

BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # that the library's kernels take
NESTED_BLOCKSIZE = 256  # scales of blocks that share a scale, when the library makes them
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}

_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_FP4 = tuple(sign * value / 12.0 for sign in (1, -1) for value in (0.0, 0.0625, 8, 12, 4, 6, 2, 3))
# kind -> the numbers that its 16 codes stand for; kernels have them built in
CODES = {"nf4": _NF4, "fp4": _FP4}


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a matrix [N, K] is quantised: row-major, in blocks of one scale each.

    Attributes:
        kind: "nf4" or "fp4".
        blocksize: elements of a block.
        nested: scales that share a scale of their own (double quantisation); 0: scales are plain.
        dtype: of the numbers that were quantised, and that dequantising gives.
        own_code: the file brings a code of its own, which kernels do not know.
    """

    kind: str
    blocksize: int = 64
    nested: int = 0
    dtype: str = "float32"
    own_code: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        """``dtype`` as torch has it."""
        return DTYPES[self.dtype]

    def blocks(self, numel: int) -> int:
        """Blocks of so many elements; the last may be short."""
        return -(-numel // self.blocksize)

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able values."""
        return asdict(self)
