"""What a checkpoint says of one 4-bit matrix: its ``quant_state`` tensor, which is JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from loadkit.errors import FormatError
from loadkit.file_checks import show
from loadkit.json_safe import parse_json
from loadkit_bitsandbytes.scheme import BLOCKSIZES, DTYPES, Scheme

__all__ = ["QuantState", "parse_quant_state", "quant_error"]

_MAX_BYTES = 1 << 16  # of the JSON
_MAX_SIDE = 1 << 40
_PLAIN = {"quant_type", "blocksize", "dtype", "shape"}
_NESTED = {"nested_blocksize", "nested_dtype", "nested_offset"}


class QuantState(NamedTuple):
    """How a matrix is quantised, its shape [N, K], and what is added to nested scales."""

    scheme: Scheme
    shape: tuple[int, int]
    offset: float = 0.0


def quant_error(
    tensor: str,
    problem: str,
    *,
    file: str | None = None,
    offset: int | None = None,
    hint: str | None = None,
    **detail: Any,
) -> FormatError:
    """E_QUANT: what a checkpoint says of a quantised tensor cannot be."""
    return FormatError(
        f"tensor {show(tensor)}: {problem}",
        code="E_QUANT",
        file=file,
        tensor=tensor,
        offset=offset,
        detail=detail or None,
        hint=hint or "the checkpoint is damaged, or was not saved by bitsandbytes",
    )


def parse_quant_state(
    data: bytes, *, tensor: str, kind: str, file: str | None = None, offset: int | None = None
) -> QuantState:
    """The state that a ``quant_state.bitsandbytes__KIND`` tensor holds.

    Args:
        data: the tensor's bytes.
        tensor: its name, for errors.
        kind: what its name says.
        file: where it lies.
        offset: where in there; bytes.

    Raises:
        FormatError: E_QUANT, it is no JSON, lacks a value, or has one that cannot be.
    """

    def bad(problem: str) -> FormatError:
        return quant_error(tensor, problem, file=file, offset=offset)

    try:
        values = parse_json(data, file=file or "", max_bytes=_MAX_BYTES)
    except FormatError as error:
        raise bad(f"it is no JSON: {error.message}") from error
    if not isinstance(values, Mapping):
        raise bad("its JSON is no object")
    unknown = sorted(map(str, values.keys() - _PLAIN - _NESTED))
    missing = sorted(_PLAIN - values.keys())
    if unknown or missing:
        what = f"lacks {', '.join(missing)}" if missing else f"has unknown {show(unknown[0])}"
        raise bad(f"its JSON {what}")
    if kind not in ("nf4", "fp4") or values["quant_type"] != kind:
        raise bad(
            f"its name says {show(kind)}, and its quant_type is {show(values['quant_type'])}; "
            "known are nf4 and fp4"
        )
    if not _is_int(values["blocksize"]) or values["blocksize"] not in BLOCKSIZES:
        raise bad(
            f"blocksize is {show(values['blocksize'])}; accepted: "
            + ", ".join(map(str, BLOCKSIZES))
        )
    dtype = values["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise bad(f"dtype is {show(dtype)}; accepted: {', '.join(DTYPES)}")
    shape = values["shape"]
    if not (isinstance(shape, list) and len(shape) == 2 and all(map(_is_side, shape))):
        raise bad(f"shape is {show(shape)}, and not that of a matrix")
    nested, added = _nested(values, bad)
    scheme = Scheme(kind, values["blocksize"], nested, dtype)
    return QuantState(scheme, (shape[0], shape[1]), added)


def _nested(values: Mapping[str, Any], bad: Any) -> tuple[int, float]:
    """Of double quantisation: its block size and offset; (0, 0.0) without it."""
    given = _NESTED & values.keys()
    if not given:
        return 0, 0.0
    if given != _NESTED:
        raise bad(f"it is nested, and its JSON lacks {', '.join(sorted(_NESTED - given))}")
    blocksize, offset = values["nested_blocksize"], values["nested_offset"]
    if not _is_int(blocksize) or not 0 < blocksize <= 1 << 16:
        raise bad(f"nested_blocksize is {show(blocksize)}; accepted: a number from 1 to 65536")
    if isinstance(offset, bool) or not isinstance(offset, (int, float)):
        raise bad(f"nested_offset is {show(offset)}, and no number")
    if not math.isfinite(offset):
        raise bad(f"nested_offset is {offset}")
    if values["nested_dtype"] != "float32":
        raise bad(f"nested_dtype is {show(values['nested_dtype'])}; accepted: float32")
    return blocksize, float(offset)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_side(value: Any) -> bool:
    return _is_int(value) and 0 < value < _MAX_SIDE
