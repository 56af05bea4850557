"""The files of a saved checkpoint: names, which tensors go into which, what they replace."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence

from loadkit.manifest import is_manifest_name
from loadkit.safetensors_writer import Entry
from loadkit.tensor_info import DTYPES

__all__ = [
    "INDEX",
    "MAX_SHARD_BYTES",
    "index_bytes",
    "is_replaced",
    "main_dtype",
    "shard_name",
    "split_shards",
]

MAX_SHARD_BYTES = 5_000_000_000
INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_WEIGHTS = re.compile(
    r"model(-\d{5,}-of-\d{5,})?\.safetensors|model\.safetensors\.index\.json|"
    r"model-rank-\d+-part-\d+\.safetensors|model(-rank-\d+)?\.tensors|"
    r"\.metadata|__\d+_\d+\.distcp"
)


def is_replaced(name: str) -> bool:
    """Whether a file of an old folder belongs to a saved model, of whatever layout.

    It goes when another one is saved there: a folder holds one model.
    """
    return _WEIGHTS.fullmatch(name) is not None or is_manifest_name(name)


def shard_name(number: int, count: int) -> str:
    """The name of weight file ``number`` (from 0) of ``count``."""
    return _SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def split_shards(groups: Sequence[Sequence[Entry]], most: int) -> list[list[Entry]]:
    """Entries in files of at most ``most`` bytes of tensors, in order.

    The parts of one fused parameter stay in one file, side by side, where they fit: a load maps
    them as one view.
    """
    shards: list[list[Entry]] = [[]]
    filled = 0
    for group in groups:
        whole = sum(entry.nbytes for entry in group)
        pieces = [list(group)] if whole <= most else [[entry] for entry in group]
        for piece in pieces:
            nbytes = sum(entry.nbytes for entry in piece)
            if shards[-1] and filled + nbytes > most:
                shards.append([])
                filled = 0
            shards[-1] += piece
            filled += nbytes
    return shards


def index_bytes(weight_map: Mapping[str, str], total_size: int) -> bytes:
    """The index of several files: tensor -> file, and the bytes of all tensors."""
    index = {
        "metadata": {"total_size": total_size},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return (json.dumps(index, indent=2) + "\n").encode()


def main_dtype(entries: Iterable[Entry]) -> str | None:
    """The torch name of the float dtype that most bytes are in; 8-bit floats do not count."""
    sizes: dict[str, int] = {}
    for entry in entries:
        if entry.dtype in ("F16", "BF16", "F32", "F64"):
            sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.nbytes
    return DTYPES[max(sizes, key=lambda name: sizes[name])][1] if sizes else None
