"""``LazyTensor``: a ``torch.Tensor`` that knows shape, dtype and where its bytes are, not what.

Anybody's loader code may narrow, transpose, cast and add it. Views are arithmetic on strides;
everything else becomes a deferred operation (``recorder``). Asked for a number (``.item()``,
``if (w == 0).all()``), it reads exactly what that takes. What would lie or kill (``data_ptr``,
``numpy``, ``share_memory_``, pickling) refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Self

import torch

from loadkit.errors import FormatError, TraceError
from loadkit.tensor_info import TensorInfo, torch_dtype
from loadkit.text import printable
from loadkit.tracing.storage import (
    Constant,
    FileLeaf,
    GeneratedLeaf,
    Operation,
    Storage,
    Value,
)
from loadkit.tracing.view import View, contiguous

__all__ = ["LazyTensor", "Offered", "generated", "lazy_from_info", "leaf_file", "leaf_names"]

Dispatcher = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

_dispatch: Dispatcher | None = None


def set_dispatcher(dispatch: Dispatcher) -> None:
    """Install what executes an aten call on lazy tensors (``operations`` does, once)."""
    global _dispatch
    _dispatch = dispatch


_CPU = torch.device("cpu")  # making one is a call that a recorder sees


class LazyTensor(torch.Tensor):
    """A view of a recorded storage. It reports ``device`` cpu, as a tensor read from a file is."""

    lazy_storage: Storage

    @staticmethod
    def __new__(cls, storage: Storage, view: View, dtype: torch.dtype) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls,
            view.size,
            strides=view.stride,
            storage_offset=view.offset,
            dtype=dtype,
            device=_CPU,
            requires_grad=False,
        )
        made.lazy_storage = storage
        return made

    def __init__(self, storage: Storage, view: View, dtype: torch.dtype) -> None:
        super().__init__()

    @property
    def lazy_view(self) -> View:
        """Which elements of its storage it shows."""
        return View(
            tuple(self.size()), self.stride(), int(self.storage_offset()), self.dtype.itemsize
        )

    def lazy_value(self) -> Value:
        """What it holds now."""
        storage = self.lazy_storage
        return Value(storage, len(storage.writes), self.lazy_view, self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        names = ", ".join(sorted(leaf_names(self.lazy_value()))) or "no file"
        return f"LazyTensor(size={list(self.size())}, dtype={self.dtype}, from {names})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _REFUSED:
            _refuse(func, args)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _dispatch is None:
            raise TraceError("lazy tensors are not set up: import loadkit.tracing.operations")
        return _dispatch(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse("pickling", (self,))


def _refuse(func: Any, args: tuple[Any, ...]) -> NoReturn:
    name = getattr(func, "__name__", str(func))
    first = next((a for a in args if isinstance(a, LazyTensor)), None)
    tensors = sorted(leaf_names(first.lazy_value())) if first is not None else []
    raise TraceError(
        f"{name} was asked of a tensor that is not in memory yet "
        f"({', '.join(tensors) or 'scratch'})",
        tensor=tensors[0] if tensors else None,
        detail={"tensors": tensors},
        hint="the tensors concerned are loaded again with real data",
    )


_REFUSED = {
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.Tensor.data_ptr,
    torch.Tensor.share_memory_,
    torch.Tensor.untyped_storage,
    torch.Tensor.storage,
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
    torch.Tensor.pin_memory,
    torch.Tensor.cuda,
}


def lazy_from_info(info: TensorInfo) -> LazyTensor:
    """The tensor of a file header entry. No byte is read. Shape and dtype as the header says.

    Raises:
        FormatError: E_DTYPE, this torch lacks the dtype; names tensor and file.
    """
    dtype = _dtype_of(info)
    storage = Storage.of_leaf(FileLeaf(info, info.name, info.shape, dtype))
    return LazyTensor(storage, contiguous(info.shape, dtype.itemsize), dtype)


def _dtype_of(info: TensorInfo) -> torch.dtype:
    """The torch dtype of a header entry."""
    try:
        return torch_dtype(info.dtype)
    except FormatError as error:
        raise FormatError(
            f"tensor '{printable(info.name)}' of '{printable(info.file.name)}': {error.message}",
            code=error.code,
            file=info.file.name,
            tensor=info.name,
            hint="install a newer torch",
        ) from error


class Offered:
    """A checkpoint tensor that nobody has asked for yet: its header entry.

    A tensor that belongs to another rank is told by its name; no ``LazyTensor`` is made for it.

    Attributes:
        info: the entry, its shape as torch counts elements.
    """

    __slots__ = ("info",)

    def __init__(self, info: TensorInfo) -> None:
        self.info = info

    @property
    def shape(self) -> tuple[int, ...]:
        """As the header says."""
        return self.info.shape

    def size(self) -> tuple[int, ...]:
        """As the header says."""
        return self.info.shape

    @property
    def dtype(self) -> torch.dtype:
        """As the header says.

        Raises:
            FormatError: E_DTYPE, this torch lacks the dtype.
        """
        return _dtype_of(self.info)

    def tensor(self) -> LazyTensor:
        """The lazy tensor.

        Raises:
            FormatError: E_DTYPE, this torch lacks the dtype.
        """
        return lazy_from_info(self.info)


def generated(leaf: GeneratedLeaf) -> LazyTensor:
    """A tensor made by a formula instead of read from a file."""
    storage = Storage.of_leaf(leaf)
    return LazyTensor(storage, contiguous(leaf.size, leaf.dtype.itemsize), leaf.dtype)


def leaf_file(tensor: torch.Tensor | Offered) -> str | None:
    """The file that a checkpoint tensor lies in, in blocks too; None for any other tensor."""
    if isinstance(tensor, Offered):
        return tensor.info.file.name
    base = tensor.lazy_storage.base if isinstance(tensor, LazyTensor) else None
    if isinstance(base, Operation):
        base = next((value.storage.base for value in base.inputs()), None)
    return base.info.file.name if isinstance(base, FileLeaf) else None


def leaf_names(value: Value) -> set[str]:
    """Names of the checkpoint tensors that a value is made of (a superset of those read)."""
    names: set[str] = set()
    seen: set[int] = set()
    stack = [value.storage]
    while stack:
        storage = stack.pop()
        if id(storage) in seen:
            continue
        seen.add(id(storage))
        base = storage.base
        if isinstance(base, (FileLeaf, GeneratedLeaf)):
            names.add(base.name)
        elif isinstance(base, Constant) and base.source:
            names.add(base.source)
        elif isinstance(base, Operation):
            stack.extend(item.storage for item in base.inputs())
        stack.extend(w.value.storage for w in storage.writes if isinstance(w.value, Value))
    return names
