"""The packed rows of a GGUF file and of the ranks of a model, and files with blocks in them.

A second way to the same bytes: the file's, in Hugging Face's names and order of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch

from helpers.gguf_files import Tensor
from helpers.gguf_metadata import read_metadata
from helpers.gguf_reference import hf_name
from loadkit.sources.local_file import LocalFile
from loadkit_gguf.header import read_gguf_header
from loadkit_gguf.packed_parameter import GGUFParameter

__all__ = ["Matrix", "joined_ranks", "matrices", "quantised"]

_PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_BY_COLUMNS = ("o_proj", "down_proj")


class Matrix(NamedTuple):
    """A tensor's type, and its rows as bytes: uint8 [rows, bytes of a row]."""

    kind: str
    rows: torch.Tensor


def matrices(path: Path) -> dict[str, Matrix]:
    """Every matrix of a file by its Hugging Face name; q and k of a Llama as Hugging Face has them.

    H heads: a head's rows are pairs of neighbours in the file, and two halves there.
    """
    keys = read_metadata(path)
    architecture = keys["general.architecture"]
    file = LocalFile(path.name, str(path))
    found: dict[str, Matrix] = {}
    for tensor in read_gguf_header(file).tensors:
        if len(tensor.shape) != 2:
            continue
        raw = np.frombuffer(file.read(tensor.offset, tensor.nbytes), np.uint8)
        rows = raw.reshape(tensor.shape[0], -1)
        name = hf_name(tensor.name, architecture)
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = keys[f"llama.attention.head_count{'_kv' if 'k_proj' in name else ''}"]
            pairs = rows.reshape(heads, len(rows) // heads // 2, 2, -1)
            rows = pairs.swapaxes(1, 2).reshape(rows.shape)
        found[name] = Matrix(tensor.dtype, torch.from_numpy(np.array(rows)))
    file.close()
    return found


def joined_ranks(models: Sequence[Any], kv_heads: int) -> dict[str, Matrix]:
    """What the ranks of a packed model hold together, put side by side: one matrix per tensor."""
    found: dict[str, Matrix] = {}
    ranks = [dict(model.named_parameters()) for model in models]
    for name, first in ranks[0].items():
        if not isinstance(first, GGUFParameter):
            continue
        module = name.split(".")[-2]
        for index, part in enumerate(_PARTS.get(module, (module,))):
            shown = [rank[name].rows_of(index) for rank in ranks]
            if part in ("k_proj", "v_proj") and len(ranks) > kv_heads:
                shown = shown[:: len(ranks) // kv_heads]  # neighbours hold the same head
            along = 1 if part in _BY_COLUMNS else 0
            whole = torch.cat(shown, dim=along)
            found[name.replace(module, part)] = Matrix(first.pieces[index].kind, whole)
    return found


def quantised(tensors: Sequence[Tensor], kind_of: Callable[[str], str | None]) -> list[Tensor]:
    """float32 tensors with those stored in blocks that ``kind_of`` names a ggml type for."""
    made = []
    for tensor in tensors:
        kind = kind_of(str(tensor.name)) if len(tensor.dims) == 2 else None
        if kind is not None:
            number = gguf.GGMLQuantizationType[kind]
            values = np.frombuffer(tensor.data, np.float32).reshape(tensor.dims[::-1])
            data = gguf.quants.quantize(values, number).tobytes()
            tensor = tensor._replace(kind=int(number), data=data)
        made.append(tensor)
    return made
