"""Rows that stay as the file stores them: how many bytes they take, and what numbers they hold."""

from __future__ import annotations

import torch

from loadkit.errors import ModelError
from loadkit_gguf.encodings import ENCODINGS

__all__ = ["decode_rows", "is_blocks", "row_unit"]

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ROUNDED = (torch.float32, torch.bfloat16, torch.float16)  # what decoders write themselves


def is_blocks(kind: str) -> bool:
    """Whether a ggml type stores blocks that can be decoded."""
    return kind in ENCODINGS


def row_unit(kind: str) -> tuple[int, int] | None:
    """Elements and bytes of the smallest part of a row of a ggml type; None: it stays not packed.

    A plain type is a block of one element: it may be a part of a parameter beside real blocks.
    """
    if kind in _PLAIN:
        return 1, _PLAIN[kind].itemsize
    encoding = ENCODINGS.get(kind)
    return None if encoding is None else (encoding.block, encoding.block_bytes)


def decode_rows(kind: str, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of rows: uint8 [..., bytes] to [..., K] of a float dtype, on the same device.

    They are what a load that decodes stores in a parameter of this dtype, bit for bit: decoded as
    float32 and rounded once. Blocks that lie on an accelerator are decoded on the host.

    Raises:
        ModelError: the type is not one of rows that stay packed, or the bytes are no whole blocks.
    """
    unit = row_unit(kind)
    if unit is None:
        raise ModelError(f"rows of {kind} are not kept packed", code="E_DTYPE")
    if kind in _PLAIN:
        size = _PLAIN[kind].itemsize
        dense = packed.contiguous()
        if dense.storage_offset() % size:
            dense = dense.clone()
        return dense.view(_PLAIN[kind]).to(dtype)
    here = packed.to("cpu")
    size = packed.shape[-1] // unit[1] * unit[0]
    made = dtype if dtype in _ROUNDED else torch.float32
    with torch.inference_mode(mode=False):  # threads that decode are not in it, and write to this
        out = torch.empty((*packed.shape[:-1], size), dtype=made, device="cpu")
        ENCODINGS[kind].decode_into(here, out)
    return out.to(device=packed.device, dtype=dtype)
