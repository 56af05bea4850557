"""What a pickle's objects are here: names and numbers. Nothing of them is ever called."""

from __future__ import annotations

from typing import Any

__all__ = [
    "LIST",
    "OTHER",
    "STORAGES",
    "TORCH_DTYPES",
    "Global",
    "Mapping",
    "Nested",
    "Opaque",
    "StorageRef",
    "TensorRef",
    "kind_of",
]


class Opaque:
    """Something that is no tensor and holds none that counts: a list, bytes."""

    __slots__ = ("kind",)

    def __init__(self, kind: str) -> None:
        self.kind = kind


LIST = Opaque("a list")
OTHER = Opaque("an object")


class Nested(tuple[Any, ...]):
    """A tuple with a tuple in it: it may go into no other one."""

    __slots__ = ()


class Global:
    """A name that the pickle imports. ``at``: the offset of the opcode, in the file."""

    __slots__ = ("at", "module", "name")

    def __init__(self, module: str, name: str, at: int) -> None:
        self.module = module
        self.name = name
        self.at = at

    def __str__(self) -> str:
        return f"{self.module} {self.name}"


class Mapping:
    """A dict. ``odd``: what its first key that is no string was, and where."""

    __slots__ = ("items", "odd")

    def __init__(self) -> None:
        self.items: dict[str, Any] | None = None
        self.odd: tuple[str, int] | None = None


class StorageRef:
    """A storage: its record's key, its dtype (a name of ``DTYPES``) and its elements."""

    __slots__ = ("at", "dtype", "key", "location", "numel")

    def __init__(self, key: str, dtype: str, numel: int, location: str, at: int) -> None:
        self.key = key
        self.dtype = dtype
        self.numel = numel
        self.location = location
        self.at = at


class TensorRef:
    """A tensor, as the pickle says it is; nothing of it has been checked."""

    __slots__ = ("at", "dtype", "offset", "size", "storage", "stride")

    def __init__(
        self,
        storage: StorageRef,
        offset: int,
        size: tuple[int, ...],
        stride: tuple[int, ...],
        dtype: str,
        at: int,
    ) -> None:
        self.storage = storage
        self.offset = offset
        self.size = size
        self.stride = stride
        self.dtype = dtype
        self.at = at


# Storage classes of torch -> the names of dtypes in headers. UntypedStorage counts bytes.
STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
    "ComplexFloatStorage": "C64",
    "ComplexDoubleStorage": "C128",
    "UntypedStorage": "U8",
}
# torch's dtypes, where a pickle names one -> the same. Those of no header ("") are refused later.
TORCH_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
    "complex64": "C64",
    "complex128": "C128",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
}


def kind_of(value: object) -> str:
    """What a value is, for people: ``a number``, ``a dict of 3``, ..."""
    if isinstance(value, TensorRef):
        return "a tensor"
    if isinstance(value, Mapping):
        return f"a dict of {len(value.items or ())}"
    if isinstance(value, Opaque):
        return value.kind
    if isinstance(value, Global):
        return f"the name {value}"
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, (int, float)):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "a tuple" if isinstance(value, tuple) else "an object"
