"""The two modes of a recorded thread: every aten call, and what no aten call shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from loadkit.errors import TraceError
from loadkit.tracing import operations
from loadkit.tracing.lazies import as_lazy, interesting
from loadkit.tracing.lazy_tensor import LazyTensor, leaf_names
from loadkit.tracing.reading import all_of
from loadkit.tracing.schema import kind_of, makes_numbers_on_meta, reads_no_memory
from loadkit.tracing.storage import Value

if TYPE_CHECKING:
    from loadkit.tracing.recorder import Recorder

__all__ = ["DispatchMode", "FunctionMode"]


class DispatchMode(TorchDispatchMode):
    """Correctness: every aten call of the thread passes here."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch's wrapper for that costs as much as a call itself, and imports a compiler."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        recorder = self.recorder
        if not recorder.is_active():  # a thread that outlived its recording
            return func(*args, **kwargs)
        kind = kind_of(func)
        with recorder.lock:
            if kind.factory and recorder.phase == "init":
                return recorder.make_initial(func, args, kwargs)
            if kind.odd:
                return operations.odd_write(func, args, kwargs, recorder)
            if kind.writes:
                target = args[0] if args else None
                if recorder._fills and isinstance(target, torch.Tensor):
                    recorder.forget_fill(target)
                if isinstance(target, torch.Tensor) and self._is_recorded(target, (args, kwargs)):
                    if (
                        recorder.phase == "init"
                        and func not in _INIT_WRITES
                        and target.device.type == "meta"
                    ):
                        return target  # an initialiser on a parameter: nothing to keep
                    return operations.call(func, args, kwargs)
                return func(*args, **kwargs)
            if kind.factory and recorder.phase == "load":
                return recorder.make_scratch(func, args, kwargs)
            if kind.view:
                if isinstance(args[0], LazyTensor):
                    return operations.call(func, args, kwargs)
                return func(*args, **kwargs)
            if interesting((args, kwargs), recorder):
                return operations.call(func, args, kwargs)
            if recorder.phase == "load":
                if reads_no_memory(func, (args, kwargs)):
                    return operations.call(func, args, kwargs)
                if makes_numbers_on_meta(args, kwargs):
                    kwargs = {**kwargs, "device": "cpu"}
            return func(*args, **kwargs)

    def _is_recorded(self, target: torch.Tensor, tree: Any) -> bool:
        if isinstance(target, LazyTensor) or target.device.type == "meta":
            return True
        return self.recorder.tracked(target) is not None or interesting(tree, self.recorder)


_INIT_WRITES = {
    torch.ops.aten.copy_.default,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.fill_.Tensor,
    torch.ops.aten.zero_.default,
}


class FunctionMode(TorchFunctionMode):
    """What no aten call shows: ``param.data = x``, and reads behind torch's back."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _WATCHED and self.recorder.is_active():
            if func == _SET_DATA:
                return self._set_data(args[0], args[1])
            if func in _INITIALISERS:
                tensor: Any = args[0] if args else (kwargs or {})["tensor"]
                if self.recorder.phase == "init" and tensor.device.type == "meta":
                    return tensor  # as the dispatch mode does, before anything is computed
            elif func is torch.empty:
                if self.recorder.phase == "init" and torch._C._len_torch_dispatch_stack() == 1:
                    with torch._C._DisableTorchDispatch():  # nothing is known of what it holds
                        return func(*args, **(kwargs or {}))
            elif func in _MAKES_NUMBERS:
                if self.recorder.phase == "load":
                    args, kwargs = _off_meta(func, args, kwargs or {})
            elif not isinstance(args[0], LazyTensor):
                if func in _CLONES and self.recorder.is_changed(args[0]):
                    return as_lazy(args[0], self.recorder).clone()
                self._refuse_if_changed(func, args[0])
        return func(*args, **kwargs) if kwargs else func(*args)

    def _set_data(self, target: torch.Tensor, value: torch.Tensor) -> None:
        """Re-home a parameter; on meta the new contents are recorded."""
        if isinstance(target, LazyTensor):
            raise TraceError("assigning .data of a tensor that is not in memory cannot be recorded")
        recorder = self.recorder
        alike = (target.device.type == "meta") == (value.device.type == "meta")
        if alike and not isinstance(value, LazyTensor):
            if id(recorder.tracked(target)) in recorder.live:
                recorder._rehomed.append((target, _twin(target, target.detach())))
            _SET_DATA(target, value)
            return
        with recorder.lock:
            home = recorder.home_of(value)
            if target.device.type == "meta":
                _SET_DATA(target, home)
            else:
                twin = _twin(target, home)
                torch.utils.swap_tensors(target, twin)
                recorder._rehomed.append((target, twin))

    def _refuse_if_changed(self, func: Any, tensor: Any) -> None:
        if not isinstance(tensor, torch.Tensor):
            return
        on_meta = tensor.device.type == "meta"
        if func is torch.Tensor.untyped_storage and on_meta:
            return  # it has no bytes to lie about
        if not self.recorder.is_changed(tensor) and not (on_meta and func in _ADDRESSES):
            return
        storage = self.recorder.track(tensor)
        value = Value(storage, len(storage.writes), all_of(storage), tensor.dtype)
        names = sorted(leaf_names(value))
        raise TraceError(
            f"{getattr(func, '__name__', func)} was asked of memory that is not written yet",
            tensor=names[0] if names else None,
            detail={"tensors": names},
        )


def _off_meta(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a call that would make numbers on meta, where they are lost: on the CPU."""
    on_meta = bool(args) and isinstance(args[0], torch.Tensor) and args[0].device.type == "meta"
    if func in _INDEXING and on_meta:
        args = (args[0], _index_off_meta(args[1]), *args[2:])
    elif func is torch.Tensor.new_tensor and on_meta:
        kwargs = {"device": "cpu", **kwargs}
    device = kwargs.get("device")
    data = kwargs.get("data", args[-1] if args else None)
    wanted = device is not None and torch.device(device).type == "meta"
    if wanted and not isinstance(data, torch.Tensor):
        kwargs = {**kwargs, "device": "cpu"}
    return args, kwargs


def _index_off_meta(index: Any) -> Any:
    if isinstance(index, (list, range)) or type(index).__name__ == "ndarray":
        has_tensors = isinstance(index, list) and any(isinstance(i, torch.Tensor) for i in index)
        return index if has_tensors else torch.tensor(index)
    if isinstance(index, tuple):
        return tuple(_index_off_meta(item) for item in index)
    return index


def _twin(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """A tensor of the same Python type and attributes over other data."""
    twin = torch.Tensor._make_subclass(type(tensor), data, tensor.requires_grad)
    twin.__dict__.update(tensor.__dict__)
    return twin


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]

_ADDRESSES = {torch.Tensor.data_ptr, torch.Tensor.share_memory_}

_CLONES = {torch.Tensor.__deepcopy__}

_INDEXING = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}

_MAKES_NUMBERS = {torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor, *_INDEXING}

_INITIALISERS = {
    nn.init.uniform_,
    nn.init.normal_,
    nn.init.trunc_normal_,
    nn.init.kaiming_uniform_,
}

_WATCHED = {
    _SET_DATA,
    torch.empty,
    *_INITIALISERS,
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.Tensor.storage,
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
    torch.Tensor.untyped_storage,
    *_ADDRESSES,
    *_CLONES,
    *_MAKES_NUMBERS,
}
