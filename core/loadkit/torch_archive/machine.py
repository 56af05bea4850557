"""The pickle of a state dict, walked for its tensors: names, numbers and nothing else.

Source: ``torch/_utils.py`` (what rebuilds).
"""

from __future__ import annotations

from typing import Any

from loadkit.file_checks import show
from loadkit.torch_archive.names import check_name, storage_dtype
from loadkit.torch_archive.stack import MAX_PICKLE_BYTES, MoreNeededError, StackMachine
from loadkit.torch_archive.values import (
    TORCH_DTYPES,
    Global,
    Mapping,
    Opaque,
    StorageRef,
    TensorRef,
    kind_of,
)

__all__ = ["MAX_PICKLE_BYTES", "Machine", "MoreNeededError"]

_WHOLE = (b")\x81", b"q\0)\x81", b"r\0\0\0\0)\x81")  # an instance without arguments


class Machine(StackMachine):
    """One pickle of ``torch.save``.

    Attributes:
        storages: those that it names, by key.
    """

    def __init__(self, data: bytes, file: str, base: int = 0, *, complete: bool = True) -> None:
        super().__init__(data, file, base, complete=complete)
        self.storages: dict[str, StorageRef] = {}

    def _check_name(self, found: Global) -> None:
        check_name(found, self.file, whole=self._is_whole(found.module))

    def _is_whole(self, module: str) -> bool:
        """Whether the pickle is one object of the class that was just named."""
        first = not self.stack and not self.marks
        instance = self.data.startswith(_WHOLE, self.at)
        return first and (instance or module.startswith("torch.nn."))

    def _reduce(self) -> None:
        arguments, called = self.stack.pop(), self.stack.pop()
        if type(called) is not Global or not isinstance(arguments, tuple):
            self._fail(f"{kind_of(called)} is called", -1)
        name = called.name
        made: Any
        if name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_tensor"):
            made = self._tensor(name, arguments)
        elif name in ("_rebuild_parameter", "_rebuild_parameter_with_state"):
            made = arguments[0] if arguments else None
            if type(made) is not TensorRef:
                self._fail(f"a parameter is made of {kind_of(made)}", -1)
        elif name == "OrderedDict" and not arguments:
            made = Mapping()
        elif name == "Size" and len(arguments) == 1 and isinstance(arguments[0], tuple):
            made = arguments[0]
        elif name == "device":
            made = Opaque("a device")
        else:
            self._fail(f"{show(called)} is called with {len(arguments)} arguments", -1)
        self.stack.append(made)

    def _tensor(self, name: str, arguments: tuple[Any, ...]) -> TensorRef:
        """``(storage, offset, size, stride, requires_grad, hooks[, dtype][, metadata])``."""
        storage: Any
        given: Any
        storage, offset, size, stride = arguments[:4] if len(arguments) >= 4 else (None,) * 4
        at = self.base + self.at - 1
        good = (
            type(storage) is StorageRef
            and type(offset) is int
            and type(size) is tuple
            and type(stride) is tuple
        )
        if not good:
            self._fail("a tensor is made of no storage, offset, size and stride", -1)
        rest, dtype = arguments[6:], storage.dtype
        if name == "_rebuild_tensor_v3":
            given = rest[0] if rest else None
            known = type(given) is Global and given.module == "torch"
            if not known or given.name not in TORCH_DTYPES:
                self._fail(f"a tensor has {kind_of(given)} for a dtype", -1)
            dtype, rest = TORCH_DTYPES[given.name], rest[1:]
        metadata = rest[0] if rest else None
        if metadata is not None and (type(metadata) is not Mapping or metadata.items):
            self._fail(
                "a tensor is a conjugate or negative view", -1, "E_UNSUPPORTED",
                "save what it stands for: tensor.resolve_conj().resolve_neg()",
            )  # fmt: skip
        return TensorRef(storage, offset, size, stride, dtype, at)

    def _persistent(self) -> None:
        """``("storage", class, key, location, numel[, view])``."""
        given = self.stack.pop()
        if not isinstance(given, tuple) or len(given) < 5 or given[0] != "storage":
            if isinstance(given, tuple) and given and given[0] == "module":
                self._fail("a module is pickled whole", -1, "E_STRUCTURE")
            self._fail("a persistent id is none of a storage", -1)
        _, kind, key, location, numel = given[:5]
        dtype = storage_dtype(kind) if type(kind) is Global else None
        if dtype is None or type(key) is not str or type(location) is not str:
            self._fail(f"a storage has {kind_of(kind)} for a class, or no key", -1)
        if type(numel) is not int or (len(given) > 5 and given[5] is not None):
            self._fail("a storage has no count, or is a view of another one", -1)
        if location == "meta":
            self._fail("a tensor is on meta: it has no data", -1, "E_UNSUPPORTED")
        known = self.storages.get(key)
        if known is None:
            at = self.base + self.at - 1
            known = self.storages[key] = StorageRef(key, dtype, numel, location, at)
        elif (known.dtype, known.numel) != (dtype, numel):
            self._fail(f"storage {show(key)} is of two kinds", -1, "E_LAYOUT")
        self.stack.append(known)
