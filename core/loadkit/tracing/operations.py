"""What each aten call means on lazy tensors: a view, a write, or a deferred operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from loadkit.errors import TraceError
from loadkit.tracing import lazy_tensor
from loadkit.tracing.lazy_tensor import LazyTensor, leaf_names
from loadkit.tracing.storage import Constant, Fill, Operation, Storage, Unwritten, Value, Write
from loadkit.tracing.view import View, contiguous

if TYPE_CHECKING:
    from loadkit.tracing.recorder import Recorder

__all__ = ["call", "interesting", "kind_of", "tensors_in"]

aten = torch.ops.aten

_DYNAMIC = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class OpKind(NamedTuple):
    """How a call treats its arguments: ``writes`` are positions it writes to.

    ``odd``: it writes, and not simply to its first argument: ``out=``, lists of tensors, or it
    changes a tensor's shape in place.
    """

    view: bool
    writes: tuple[int, ...]
    factory: bool
    odd: bool


@cache
def kind_of(func: Any) -> OpKind:
    """The kind of an aten overload, from its schema."""
    writes = tuple(
        i
        for i, arg in enumerate(func._schema.arguments)
        if arg.alias_info is not None and arg.alias_info.is_write
    )
    view = not writes and any(
        r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
    )
    view = view or func in (aten._unsafe_view.default, aten.lift_fresh.default)
    view = view and func not in (aten._conj.default, aten._neg_view.default)  # more than strides
    odd = bool(writes) and (
        writes != (0,)
        or str(func._schema.arguments[0].type) != "Tensor"
        or torch.Tag.inplace_view in func.tags
    )
    return OpKind(view, writes, func in FACTORIES, odd)


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Every tensor inside nested tuples, lists and dicts."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from tensors_in(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from tensors_in(item)


def interesting(tree: Any, recorder: Recorder | None) -> bool:
    """Whether any tensor in it is lazy, or plain memory that recorded writes changed."""
    return any(
        isinstance(t, LazyTensor) or (recorder is not None and recorder.is_changed(t))
        for t in tensors_in(tree)
    )


def reads_no_memory(func: Any, tree: Any) -> bool:
    """Whether a call would ask memory on meta for numbers, beside real tensors or alone."""
    devices = {t.device.type for t in tensors_in(tree) if t.dim() or t.device.type == "meta"}
    if "meta" not in devices:
        return False
    return len(devices) > 1 or bool(_DYNAMIC & set(func.tags))


def makes_numbers_on_meta(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call makes numbers out of nothing (``arange``), where they would be lost."""
    device = kwargs.get("device")
    return (
        device is not None
        and torch.device(device).type == "meta"
        and next(tensors_in(args), None) is None
    )


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Execute an aten call in which lazy tensors (or recorded memory) take part."""
    from loadkit.tracing.recorder import active_recorder

    recorder = active_recorder()
    kind = kind_of(func)
    if kind.view:
        return _view(func, args, kwargs, recorder)
    if kind.writes:
        return _write(func, args, kwargs, recorder, kind)
    lower = _LOWERED.get(func)
    if lower is not None:
        result = lower(recorder, *args, **kwargs)
        if result is not NotImplemented:
            return result
    return _defer(func, args, kwargs, recorder)


lazy_tensor.set_dispatcher(call)


def as_lazy(tensor: torch.Tensor, recorder: Recorder | None) -> LazyTensor:
    """The tensor as a lazy one. Real memory is copied: code may change it later, unseen."""
    if isinstance(tensor, LazyTensor):
        return tensor
    if tensor.device.type != "meta" and (recorder is None or recorder.tracked(tensor) is None):
        source = recorder.source_of(tensor) if recorder is not None else None
        plain = tensor.detach()
        for dim, stride in enumerate(plain.stride()):
            if stride == 0 and plain.size(dim) > 1:
                plain = plain.narrow(dim, 0, 1)
        now = plain.to("cpu", copy=True, memory_format=torch.contiguous_format)
        base = Constant(now.resolve_conj().resolve_neg().reshape(-1), source)
        view = contiguous(tuple(plain.size()), tensor.dtype.itemsize)
        storage = Storage(base, view.numel, view.itemsize)
        return LazyTensor(storage, view.expand(tuple(tensor.size())), tensor.dtype)
    storage = track(tensor, recorder)
    return LazyTensor(storage, view_of(tensor), tensor.dtype)


def track(tensor: torch.Tensor, recorder: Recorder | None) -> Storage:
    """The recorded storage behind a plain tensor."""
    if recorder is not None:
        return recorder.track(tensor)
    from loadkit.tracing.recorder import storage_of_plain

    return storage_of_plain(tensor)


def note_foreign_write() -> None:
    """A thread that is not recorded tried to write: the recording under way must know."""
    from loadkit.tracing import recorder

    if recorder._active is not None:
        recorder._active.foreign_writes += 1


def view_of(tensor: torch.Tensor) -> View:
    """A tensor's layout."""
    return View(
        tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()), tensor.dtype.itemsize
    )


# ---------------------------------------------------------------- views


def _view(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], recorder: Recorder | None
) -> Any:
    base = args[0]
    if not isinstance(base, LazyTensor):
        return func(*args, **kwargs)
    quick = _QUICK_VIEWS.get(func)
    if quick is not None:
        return LazyTensor(base.lazy_storage, quick(base.lazy_view, *args[1:], **kwargs), base.dtype)
    shadow = meta_like(base)
    result = func(shadow, *args[1:], **kwargs)
    return _map_tensors(result, lambda m: LazyTensor(base.lazy_storage, view_of(m), m.dtype))


def meta_like(tensor: torch.Tensor) -> torch.Tensor:
    """A meta tensor of the same dtype and layout, offset included."""
    view = view_of(tensor)
    extent = max(view.span()[1] // view.itemsize, 0)
    return torch.empty(extent, dtype=tensor.dtype, device="meta").as_strided(
        view.size, view.stride, view.offset
    )


def _map_tensors(tree: Any, make: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(tree, torch.Tensor):
        return make(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)(_map_tensors(item, make) for item in tree)
    return tree


def _q_slice(
    v: View, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> View:
    dim %= len(v.size)
    first, last, step = slice(start, end, step).indices(v.size[dim])
    length = max(0, -(-(last - first) // step))
    out = v.narrow(dim, first if length else 0, length)
    stride = (*out.stride[:dim], out.stride[dim] * step, *out.stride[dim + 1 :])
    return View(out.size, stride, out.offset, v.itemsize)


def _q_select(v: View, dim: int, index: int) -> View:
    dim %= len(v.size)
    if not -v.size[dim] <= index < v.size[dim]:
        raise IndexError(f"index {index} is out of range for dimension {dim} of {list(v.size)}")
    index %= v.size[dim]
    return View(
        v.size[:dim] + v.size[dim + 1 :],
        v.stride[:dim] + v.stride[dim + 1 :],
        v.offset + index * v.stride[dim],
        v.itemsize,
    )


def _q_permute(v: View, dims: list[int]) -> View:
    order = [d % len(v.size) for d in dims]
    if sorted(order) != list(range(len(v.size))):
        raise RuntimeError(f"permute: {dims} does not name the dimensions of {list(v.size)}")
    return View(
        tuple(v.size[d] for d in order), tuple(v.stride[d] for d in order), v.offset, v.itemsize
    )


def _q_transpose(v: View, a: int, b: int) -> View:
    order = list(range(len(v.size)))
    if order:
        order[a], order[b] = order[b], order[a]
    return _q_permute(v, order)


def _q_t(v: View) -> View:
    return _q_transpose(v, 0, 1) if len(v.size) == 2 else v


def _q_same(v: View) -> View:
    return v


_QUICK_VIEWS: dict[Any, Callable[..., View]] = {
    aten.slice.Tensor: _q_slice,
    aten.select.int: _q_select,
    aten.permute.default: _q_permute,
    aten.transpose.int: _q_transpose,
    aten.t.default: _q_t,
    aten.detach.default: _q_same,
    aten.alias.default: _q_same,
    aten.lift_fresh.default: _q_same,
}


# ---------------------------------------------------------------- writes


def _write(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    recorder: Recorder | None,
    kind: OpKind,
) -> Any:
    if kind.odd:
        return odd_write(func, args, kwargs, recorder)
    target = args[0]
    if not isinstance(target, LazyTensor) and recorder is None:
        if target.device.type == "meta":
            note_foreign_write()
            raise _untraceable(func, (args, kwargs), "no plan is being recorded in this thread")
        real = _map_lazy((args, kwargs), lambda t: realise(t, recorder))
        return func(*real[0], **real[1])
    if func is aten.copy_.default:
        _record_copy(target, args[1], recorder)
    elif func in (aten.fill_.Scalar, aten.zero_.default):
        number = args[1] if func is aten.fill_.Scalar else 0
        record(target, Fill(number, target.dtype), recorder)
    elif func is aten.fill_.Tensor:
        _record_copy(target, args[1], recorder)
    else:
        index_write = _INDEX_WRITES.get(func)
        if index_write is None or not index_write(recorder, *args, **kwargs):
            functional = _functional(func)
            if functional is None:
                raise _untraceable(func, (args, kwargs), "it has no form that makes a new tensor")
            result = call(functional, (as_lazy(target, recorder), *args[1:]), kwargs)
            _record_copy(target, result, recorder)
    return target


def _record_copy(
    target: torch.Tensor,
    source: torch.Tensor,
    recorder: Recorder | None,
    mask: torch.Tensor | None = None,
) -> None:
    if _is_number(source, recorder) and mask is None:
        number = source.detach().to(target.dtype).reshape(()).item()
        record(target, Fill(number, target.dtype), recorder)
        return
    value = as_lazy(source, recorder).lazy_value()
    try:
        wide = value.view.expand(tuple(target.size()))
    except ValueError:
        raise RuntimeError(
            f"a tensor of size {list(source.size())} does not fit into {list(target.size())}"
        ) from None
    record(target, Value(value.storage, value.version, wide, value.dtype), recorder, mask)


def _is_number(source: torch.Tensor, recorder: Recorder | None) -> bool:
    """Whether it is a plain number, and no checkpoint tensor's."""
    if isinstance(source, LazyTensor) or source.dim() or source.device.type != "cpu":
        return False
    return recorder is None or (
        recorder.tracked(source) is None and recorder.source_of(source) is None
    )


def record(
    target: torch.Tensor,
    value: Value | Fill,
    recorder: Recorder | None,
    mask: torch.Tensor | None = None,
) -> None:
    """Append one write to the target's storage.

    Raises:
        TraceError: several of its elements are one in memory, or a numpy array sees it too.
    """
    view = view_of(target)
    if not view.is_apart():
        raise TraceError(
            f"a write to a tensor of size {list(view.size)} and strides {list(view.stride)}, in "
            "which several elements are one in memory, cannot be recorded"
        )
    if (
        recorder is not None
        and not isinstance(target, LazyTensor)
        and target.device.type == "cpu"
        and recorder.tracked(target) is None
        and not target.untyped_storage().resizable()
    ):
        names = sorted(leaf_names(value)) if isinstance(value, Value) else []
        raise TraceError(
            "a tensor that shares its memory with something outside of torch is written to",
            tensor=names[0] if names else None,
            detail={"tensors": names},
        )
    storage = target.lazy_storage if isinstance(target, LazyTensor) else track(target, recorder)
    storage.writes.append(Write(view, target.dtype, value, mask))


def odd_write(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], recorder: Recorder | None
) -> Any:
    """A write that is not simply one to the first argument.

    Raises:
        TraceError: it cannot be recorded.
    """
    names = [arg.name for arg in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    written = list(tensors_in([given[names[i]] for i in kind_of(func).writes if names[i] in given]))
    if torch.Tag.inplace_view in func.tags:
        return _change_shape(func, args, kwargs, written, recorder)
    if not interesting((args, kwargs), recorder) and not any(
        t.device.type == "meta" or (recorder is not None and recorder.tracked(t) is not None)
        for t in written
    ):
        return func(*args, **kwargs)
    with recorder.watching() if recorder is not None else nullcontext():
        if func._schema.name.startswith("aten::_foreach_"):
            return _each(func, args, kwargs)
        out = given.get("out")
        if isinstance(out, torch.Tensor) and kind_of(func).writes == (names.index("out"),):
            rest = {key: value for key, value in kwargs.items() if key != "out"}
            result = func.overloadpacket(*args, **rest)
            if result.size() == out.size():
                return out.copy_(result)
    raise _untraceable(func, (args, kwargs), "it writes to an output argument")


def _change_shape(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    written: list[torch.Tensor],
    recorder: Recorder | None,
) -> Any:
    """``t_``, ``squeeze_``, ``resize_``, ``set_``: plain memory may, a lazy tensor has none."""
    if any(isinstance(t, LazyTensor) for t in tensors_in((args, kwargs))):
        raise _untraceable(func, (args, kwargs), "it changes a tensor's shape or memory in place")
    storages = [recorder.tracked(t) if recorder is not None else None for t in written]
    sizes = [t.untyped_storage().nbytes() for t in written]
    out = func(*args, **kwargs)
    if func in (aten.resize_.default, aten.resize_as_.default) and any(
        storage is not None and t.untyped_storage().nbytes() != size
        for t, storage, size in zip(written, storages, sizes, strict=True)
    ):
        raise _untraceable(func, (args, kwargs), "it resizes memory that was written to")
    return out


def _each(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``_foreach_mul_(list, ...)``: the plain call on one after the other."""
    name = func._schema.name.removeprefix("aten::_foreach_")
    packet = getattr(aten, name, None)
    if packet is None or not isinstance(args[0], (list, tuple)):
        raise _untraceable(func, (args, kwargs), "it writes to a list of tensors")

    def item(tree: Any, i: int) -> Any:
        return tree[i] if isinstance(tree, (list, tuple)) else tree

    for i in range(len(args[0])):
        packet(*(item(a, i) for a in args), **{k: item(v, i) for k, v in kwargs.items()})
    return None


@cache
def _functional(func: Any) -> Any:
    """``aten.add_.Tensor`` -> ``aten.add.Tensor``, or None."""
    name = func._schema.name.removeprefix("aten::")
    packet = getattr(aten, name.removesuffix("_"), None) if name.endswith("_") else None
    return getattr(packet, func._overloadname, None) if packet is not None else None


def _index_runs(index: torch.Tensor, length: int) -> list[tuple[int, int, int]]:
    """(first target row, first source row, count) of each run of consecutive indices."""
    rows = index.tolist()
    runs: list[tuple[int, int, int]] = []
    for at, row in enumerate(rows):
        if not -length <= row < length:
            raise IndexError(f"index {row} is out of range for a dimension of {length}")
        row %= length
        if runs and runs[-1][0] + runs[-1][2] == row:
            first, source, count = runs[-1]
            runs[-1] = (first, source, count + 1)
        else:
            runs.append((row, at, 1))
    return runs


def _plain_index(index: Any, recorder: Recorder | None) -> torch.Tensor | None:
    """A 1-d integer index as a real tensor, else None."""
    if not isinstance(index, torch.Tensor) or index.dim() > 1:
        return None
    return realise(index, recorder).reshape(-1)


def _positions(index: torch.Tensor, length: int, recorder: Recorder | None) -> torch.Tensor | None:
    """As ``_plain_index``, for ``x[index]``: a mask becomes the positions where it is true."""
    real = _plain_index(index, recorder)
    if real is None or real.dtype not in (torch.bool, torch.uint8):
        return real
    if real.numel() != length:
        raise IndexError(f"a mask of {real.numel()} elements for a dimension of {length}")
    return real.nonzero().reshape(-1)


def _single_index(
    of: torch.Tensor, indices: list[Any], recorder: Recorder | None
) -> tuple[int, torch.Tensor] | None:
    used = [(d, i) for d, i in enumerate(indices) if i is not None]
    if len(used) != 1 or used[0][1].dim() != 1:
        return None
    dim, index = used[0]
    real = _positions(index, of.size(dim), recorder)
    return None if real is None else (dim, real)


def _index_put(
    recorder: Recorder | None,
    target: torch.Tensor,
    indices: list[Any],
    values: torch.Tensor,
    accumulate: bool = False,
) -> bool:
    if accumulate:
        return False
    single = _single_index(target, indices, recorder)
    if single is None:
        mask = torch.zeros(tuple(target.size()), dtype=torch.bool)
        real = [None if i is None else realise(i, recorder) for i in indices]
        mask[tuple(slice(None) if i is None else i for i in real)] = True
        blank = _blank_like(target)
        put = _defer(aten.index_put.default, (blank, real, values), {}, recorder)
        _record_copy(target, put, recorder, mask.reshape(-1))
        return True
    dim, index = single
    shape = list(target.size())
    shape[dim] = index.numel()
    wide = as_lazy(values, recorder).expand(shape)
    for first, source, count in _index_runs(index, target.size(dim)):
        _record_copy(target.narrow(dim, first, count), wide.narrow(dim, source, count), recorder)
    return True


def _index_copy(
    recorder: Recorder | None, target: torch.Tensor, dim: int, index: Any, source: torch.Tensor
) -> bool:
    real = _plain_index(index, recorder)
    if real is None:
        return False
    for first, at, count in _index_runs(real, target.size(dim)):
        _record_copy(target.narrow(dim, first, count), source.narrow(dim, at, count), recorder)
    return True


def _index_fill(
    recorder: Recorder | None, target: torch.Tensor, dim: int, index: Any, value: Any
) -> bool:
    real = _plain_index(index, recorder)
    if real is None or isinstance(value, torch.Tensor):
        return False
    for first, _, count in _index_runs(real, target.size(dim)):
        record(target.narrow(dim, first, count), Fill(value, target.dtype), recorder)
    return True


def _masked_fill(
    recorder: Recorder | None, target: torch.Tensor, mask: torch.Tensor, value: Any
) -> bool:
    real = realise(mask, recorder)
    wide = real.to(torch.bool).expand(tuple(target.size())).reshape(-1).clone()
    if isinstance(value, torch.Tensor):
        _record_copy(target, value, recorder, wide)
        return True
    storage = Storage(Fill(value, target.dtype), target.numel(), target.dtype.itemsize)
    filled = LazyTensor(
        storage, contiguous(tuple(target.size()), target.dtype.itemsize), target.dtype
    )
    _record_copy(target, filled, recorder, wide)
    return True


def _blank_like(target: torch.Tensor) -> LazyTensor:
    storage = Storage(Fill(0, target.dtype), target.numel(), target.dtype.itemsize)
    return LazyTensor(
        storage, contiguous(tuple(target.size()), target.dtype.itemsize), target.dtype
    )


_INDEX_WRITES: dict[Any, Callable[..., bool]] = {
    aten.index_put_.default: _index_put,
    aten._index_put_impl_.default: lambda r, t, i, v, accumulate=False, unsafe=False: _index_put(
        r, t, i, v, accumulate
    ),
    aten.index_copy_.default: _index_copy,
    aten.index_fill_.int_Scalar: _index_fill,
    aten.masked_fill_.Scalar: _masked_fill,
    aten.masked_fill_.Tensor: _masked_fill,
}


# ---------------------------------------------------------------- operations


def _defer(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], recorder: Recorder | None
) -> Any:
    """Record a call whose result is wanted later; or do it now if its shape depends on data."""
    if torch.Tag.nondeterministic_seeded in func.tags:
        raise _untraceable(func, (args, kwargs), "its result is random")
    meta_kwargs = {k: torch.device("meta") if k == "device" else v for k, v in kwargs.items()}
    shadow = _map_all((args, meta_kwargs), _to_meta)
    try:
        result = func(*shadow[0], **shadow[1])
    except (RuntimeError, NotImplementedError, IndexError, ValueError, TypeError) as error:
        if not _needs_data(func, error):
            raise
        return _do_now(func, args, kwargs, recorder)
    if not isinstance(result, (torch.Tensor, tuple, list)):
        return _do_now(func, args, kwargs, recorder)
    values = _map_all((args, kwargs), lambda t: as_lazy(t, recorder).lazy_value())
    values = (values[0], {k: v for k, v in values[1].items() if k != "device"})
    several = not isinstance(result, torch.Tensor)
    outputs = iter(range(len(result))) if several else None

    def make(meta: torch.Tensor) -> LazyTensor:
        view = contiguous_like(meta)
        output = next(outputs) if outputs is not None else None
        operation = Operation(func, values[0], values[1], output, view, meta.dtype)
        storage = Storage(operation, view.span()[1] // view.itemsize, meta.dtype.itemsize)
        return LazyTensor(storage, view, meta.dtype)

    return _map_tensors(result, make)


def contiguous_like(meta: torch.Tensor) -> View:
    """The layout a fresh result has: its strides, from offset 0."""
    return View(tuple(meta.size()), meta.stride(), 0, meta.dtype.itemsize)


def _needs_data(func: Any, error: Exception) -> bool:
    """Whether a call failed on meta because its result depends on numbers."""
    if isinstance(error, NotImplementedError) or _DYNAMIC & set(func.tags):
        return True
    text = str(error)
    return "meta" in text.lower() or "nonzero" in text


def _do_now(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], recorder: Recorder | None
) -> Any:
    real = _map_all((args, kwargs), lambda t: realise(t, recorder))
    result = func(*real[0], **real[1])
    if recorder is not None:
        names = sorted(_leaf_names_in((args, kwargs)))
        for tensor in tensors_in(result) if names else ():
            recorder.note_source(tensor, names[0])
    return result


def _leaf_names_in(tree: Any) -> set[str]:
    return {
        name
        for tensor in tensors_in(tree)
        if isinstance(tensor, LazyTensor)
        for name in leaf_names(tensor.lazy_value())
    }


def _map_all(tree: Any, make: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(tree, torch.Tensor):
        return make(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)(_map_all(item, make) for item in tree)
    if isinstance(tree, dict):
        return {key: _map_all(item, make) for key, item in tree.items()}
    return tree


def _map_lazy(tree: Any, make: Callable[[LazyTensor], Any]) -> Any:
    return _map_all(tree, lambda t: make(t) if isinstance(t, LazyTensor) else t)


def _to_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.device.type == "meta" else meta_like(tensor)


def realise(tensor: torch.Tensor, recorder: Recorder | None) -> torch.Tensor:
    """The tensor's numbers, read now. Recorded as a read of the plan."""
    from loadkit.tracing.recorder import read_now

    if not isinstance(tensor, LazyTensor):
        if recorder is None or not (recorder.is_changed(tensor) or tensor.device.type == "meta"):
            return tensor
        tensor = as_lazy(tensor, recorder)
    return read_now(tensor.lazy_value(), recorder)


def _untraceable(func: Any, tree: Any, why: str) -> TraceError:
    listed = sorted(_leaf_names_in(tree))
    return TraceError(
        f"{func} cannot be recorded: {why}",
        tensor=listed[0] if listed else None,
        detail={"tensors": listed},
    )


# ---------------------------------------------------------------- lowered to writes


def scratch(size: tuple[int, ...], dtype: torch.dtype, base: Fill | Unwritten) -> LazyTensor:
    """A fresh row-major lazy buffer."""
    view = contiguous(size, dtype.itemsize)
    return LazyTensor(Storage(base, view.numel, dtype.itemsize, scratch=True), view, dtype)


def _copied(
    recorder: Recorder | None, source: torch.Tensor, dtype: torch.dtype | None, view: View
) -> LazyTensor:
    dtype = dtype or source.dtype
    view = View(view.size, view.stride, 0, dtype.itemsize)
    storage = Storage(
        Unwritten("a copy"), view.span()[1] // dtype.itemsize, dtype.itemsize, scratch=True
    )
    out = LazyTensor(storage, view, dtype)
    _record_copy(out, source, recorder)
    return out


def _clone(recorder: Recorder | None, source: torch.Tensor, *, memory_format: Any = None) -> Any:
    shadow = aten.clone.default(_to_meta(source), memory_format=memory_format)
    return _copied(recorder, source, None, view_of(shadow))


def _to_copy(
    recorder: Recorder | None,
    source: torch.Tensor,
    *,
    dtype: Any = None,
    memory_format: Any = None,
    **_: Any,
) -> Any:
    shadow = aten.clone.default(_to_meta(source), memory_format=memory_format)
    return _copied(recorder, source, dtype, view_of(shadow))


def _cat(recorder: Recorder | None, tensors: list[torch.Tensor], dim: int = 0) -> Any:
    tensors = [t for t in tensors if tuple(t.size()) != (0,)]
    if not tensors:
        return NotImplemented
    shadow = aten.cat.default([_to_meta(t) for t in tensors], dim)
    out = scratch(tuple(shadow.size()), shadow.dtype, Unwritten("a concatenation"))
    at = 0
    for tensor in tensors:
        _record_copy(out.narrow(dim, at, tensor.size(dim)), tensor, recorder)
        at += tensor.size(dim)
    return out


def _stack(recorder: Recorder | None, tensors: list[torch.Tensor], dim: int = 0) -> Any:
    shadow = aten.stack.default([_to_meta(t) for t in tensors], dim)
    out = scratch(tuple(shadow.size()), shadow.dtype, Unwritten("a stack"))
    for i, tensor in enumerate(tensors):
        _record_copy(out.select(dim, i), tensor, recorder)
    return out


def _index(recorder: Recorder | None, source: torch.Tensor, indices: list[Any]) -> Any:
    single = _single_index(source, indices, recorder)
    if single is not None:
        return _take(recorder, source, *single)
    if not any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return NotImplemented
    plain: list[Any] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            plain.append(index)
            continue
        covered = tuple(source.size())[len(plain) : len(plain) + index.dim()]
        if tuple(index.size()) != covered:
            raise IndexError(f"a mask of size {list(index.size())} for a size {list(covered)}")
        plain += realise(index, recorder).nonzero().unbind(1)
    return _defer(aten.index.Tensor, (source, plain), {}, recorder)


def _index_select(recorder: Recorder | None, source: torch.Tensor, dim: int, index: Any) -> Any:
    real = _plain_index(index, recorder)
    return NotImplemented if real is None else _take(recorder, source, dim, real)


def _take(recorder: Recorder | None, source: torch.Tensor, dim: int, index: torch.Tensor) -> Any:
    size = list(source.size())
    size[dim] = index.numel()
    out = scratch(tuple(size), source.dtype, Unwritten("a selection"))
    for first, at, count in _index_runs(index, source.size(dim)):
        _record_copy(out.narrow(dim, at, count), source.narrow(dim, first, count), recorder)
    return out


def _repeat(recorder: Recorder | None, source: torch.Tensor, repeats: list[int]) -> Any:
    if any(n <= 0 for n in repeats):
        return NotImplemented
    size = (1,) * (len(repeats) - source.dim()) + tuple(source.size())
    whole = tuple(r * n for r, n in zip(repeats, size, strict=True))
    out = scratch(whole, source.dtype, Unwritten("a repetition"))
    apart = tuple(x for pair in zip(repeats, size, strict=True) for x in pair)
    shape = tuple(x for n in size for x in (1, n))
    _record_copy(out.view(apart), as_lazy(source, recorder).reshape(shape), recorder)
    return out


def _pad(recorder: Recorder | None, source: torch.Tensor, pad: list[int], value: Any = 0) -> Any:
    if any(p < 0 for p in pad):
        return NotImplemented
    size = list(source.size())
    inner: list[tuple[int, int]] = []
    for k in range(len(pad) // 2):
        dim = len(size) - 1 - k
        inner.append((dim, pad[2 * k]))
        size[dim] += pad[2 * k] + pad[2 * k + 1]
    out = scratch(tuple(size), source.dtype, Fill(value, source.dtype))
    middle: torch.Tensor = out
    for dim, before in inner:
        middle = middle.narrow(dim, before, source.size(dim))
    _record_copy(middle, source, recorder)
    return out


_LOWERED: dict[Any, Callable[..., Any]] = {
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.index.Tensor: _index,
    aten.index_select.default: _index_select,
    aten.constant_pad_nd.default: _pad,
    aten.repeat.default: _repeat,
}

# position of the fill value among the arguments; None: nothing is written
FACTORIES: dict[Any, int | str | None] = {
    aten.empty.memory_format: None,
    aten.empty_strided.default: None,
    aten.empty_like.default: None,
    aten.new_empty.default: None,
    aten.new_empty_strided.default: None,
    aten.zeros.default: "zero",
    aten.zeros_like.default: "zero",
    aten.new_zeros.default: "zero",
    aten.ones.default: "one",
    aten.ones_like.default: "one",
    aten.new_ones.default: "one",
    aten.full.default: 1,
    aten.full_like.default: 1,
    aten.new_full.default: 2,
}
