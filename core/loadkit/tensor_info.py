"""One checkpoint tensor as its header describes it, and the one table of dtype names."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from loadkit.errors import FormatError

if TYPE_CHECKING:
    import torch

    from loadkit.sources.base import File

__all__ = ["DTYPES", "TensorInfo", "bits_of", "torch_dtype"]

# safetensors name -> (bits per element, torch attribute)
DTYPES: dict[str, tuple[int, str]] = {
    "BOOL": (8, "bool"),
    "F4": (4, "float4_e2m1fn_x2"),
    "F8_E5M2": (8, "float8_e5m2"),
    "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"),
    "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"),
    "F8_E8M0": (8, "float8_e8m0fnu"),
    "U8": (8, "uint8"),
    "I8": (8, "int8"),
    "U16": (16, "uint16"),
    "I16": (16, "int16"),
    "F16": (16, "float16"),
    "BF16": (16, "bfloat16"),
    "U32": (32, "uint32"),
    "I32": (32, "int32"),
    "F32": (32, "float32"),
    "U64": (64, "uint64"),
    "I64": (64, "int64"),
    "F64": (64, "float64"),
    "C64": (64, "complex64"),
}
# What other formats hold and safetensors has no name for: read, never written.
_UNNAMED: dict[str, tuple[int, str]] = {"C128": (128, "complex128")}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: ``shape`` in elements, ``offset`` and ``nbytes`` in bytes of ``file``.

    ``dtype`` is a name of ``DTYPES``, or "C128"; elements are row-major and contiguous.
    """

    name: str
    file: File
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str


def bits_of(name: str) -> int:
    """Bits of one element of a dtype, by its name."""
    return (DTYPES.get(name) or _UNNAMED[name])[0]


@cache
def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a ``DTYPES`` name, or of "C128".

    Raises:
        FormatError: E_DTYPE, the installed torch has no such dtype.
    """
    import torch

    attribute = (DTYPES.get(name) or _UNNAMED[name])[1]
    found = getattr(torch, attribute, None)
    if not isinstance(found, torch.dtype):
        raise FormatError(
            f"dtype {name} needs a torch that has torch.{attribute}; this is {torch.__version__}",
            code="E_DTYPE",
        )
    return found
