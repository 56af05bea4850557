"""Dtypes as tensorizer writes them: numpy's name, and torch's after a NUL where numpy has none."""

from __future__ import annotations

from loadkit.tensor_info import DTYPES

__all__ = ["dtype_of"]

_NUMPY = {
    b"|b1": "BOOL",
    b"|u1": "U8",
    b"|i1": "I8",
    b"<u2": "U16",
    b"<i2": "I16",
    b"<f2": "F16",
    b"<u4": "U32",
    b"<i4": "I32",
    b"<f4": "F32",
    b"<u8": "U64",
    b"<i8": "I64",
    b"<f8": "F64",
    b"<c8": "C64",
    b"<c16": "C128",
}
# Stored as integers of their size. Complex32, sub-byte integers and the old quantised dtypes of
# torch are not among them: nothing here computes with those.
_OPAQUE = {
    b"torch." + DTYPES[name][1].encode(): name
    for name in ("BF16", "F8_E5M2", "F8_E4M3", "F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E8M0")
}


def dtype_of(raw: bytes) -> str | None:
    """The name in ``DTYPES`` (or "C128") of a stored dtype; None: it is none that can be read.

    Big-endian numbers, objects, texts and dates are none.
    """
    numpy_name, separator, torch_name = raw.partition(b"\0")
    if not separator:
        return _NUMPY.get(numpy_name)
    found = _OPAQUE.get(torch_name)
    if found is None:
        return None
    width = DTYPES[found][0] // 8
    return found if numpy_name in (b"|V%d" % width, b"<V%d" % width) else None
