"""What a tensorizer file may hold at most; published, and refused by name beyond."""

from __future__ import annotations

__all__ = [
    "MAX_DIM",
    "MAX_DIMS",
    "MAX_INDEX_BYTES",
    "MAX_META_BYTES",
    "MAX_NAME_BYTES",
    "MAX_PATH",
    "MAX_TENSORS",
]

MAX_INDEX_BYTES = 100_000_000
MAX_TENSORS = 1_000_000
MAX_NAME_BYTES = 1024
MAX_PATH = 64  # components of a structured name
MAX_DIMS = 8
MAX_DIM = 2**48  # elements along one dim, also where the product is 0
MAX_META_BYTES = 64 << 20  # of all tensors of a file that are stored as a shape, and mean zeros
