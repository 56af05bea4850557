"""What loader code left behind: lazy tensors in a model, and plain ones that would stay empty."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from types import CellType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from loadkit.errors import TraceError
from loadkit.local_memory import local_of
from loadkit.module_walk import Modules
from loadkit.tracing.lazy_tensor import LazyTensor, leaf_names

if TYPE_CHECKING:
    from loadkit.tracing.recorder import Recorder

__all__ = ["Held", "adopt", "held_tensors", "leaked_names", "settle", "stale"]

_DEPTH = 4
_OWN = ("lazy_storage", "_is_param")
_PLAIN = (int, float, str, bytes, bool, type(None), type, torch.dtype, torch.device)
# What a module's hooks for the end of a load keep is renewed by them: they are called.
_REGISTRIES = ("_parameters", "_buffers", "_modules", "_load_state_dict_post_hooks")
_SKIPPED = frozenset(_PLAIN)
_CONTAINERS = frozenset((dict, OrderedDict, list, tuple, set, frozenset))
_LOOKED_INTO = (torch.Tensor, *_CONTAINERS, FunctionType, MethodType, partial)


def _looks_into(kind: type) -> bool:
    """Whether values of a type may hold something that ``_look`` would look at."""
    if issubclass(kind, (*_PLAIN, nn.Module)):
        return False
    return issubclass(kind, _LOOKED_INTO) or bool(kind.__dictoffset__)


_may_hold: Callable[[type], bool] = lru_cache(maxsize=512)(_looks_into)


def _full(items: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """The items that may hold a tensor. Most of a module's do not, so it must be quick."""
    return [
        item
        for item in items.items()
        if (kind := type(item[1])) not in _SKIPPED
        and (kind not in _CONTAINERS or item[1])
        and _may_hold(kind)
        and (kind is not MethodType or not isinstance(item[1].__self__, nn.Module))
    ]


class Held:
    """A tensor that a model holds: where, and how to put another in its place."""

    def __init__(
        self, where: str, tensor: torch.Tensor, put: Callable[[Any], None] | None, is_part: bool
    ) -> None:
        self.where = where
        self.tensor = tensor
        self.put = put
        self.is_part = is_part  # a registered parameter or buffer


def held_tensors(modules: Modules) -> Iterator[Held]:
    """Every tensor in parameters, buffers and attributes, and in what these contain."""
    seen: set[int] = set()
    for prefix, module in modules:
        for registry in (module._parameters, module._buffers):
            for name, tensor in list(registry.items()) if registry else ():
                if tensor is not None and not is_lazy(tensor):
                    where = f"{prefix}.{name}" if prefix else name
                    yield Held(where, local_of(tensor), _item(registry, name), True)
                    if _full(tensor.__dict__):
                        yield from _inside(tensor.__dict__, where, 2, seen)
        for name, value in _full(module.__dict__):
            if name not in _REGISTRIES:
                where = f"{prefix}.{name}" if prefix else name
                yield from _look(value, where, _item(module.__dict__, name), _DEPTH, seen)


def _look(
    value: Any, where: str, put: Callable[[Any], None] | None, depth: int, seen: set[int]
) -> Iterator[Held]:
    if isinstance(value, torch.Tensor):
        yield Held(where, value, put, False)
    elif depth and _may_hold(type(value)) and id(value) not in seen:
        seen.add(id(value))
        yield from _inside(value, where, depth - 1, seen)


def _inside(value: Any, where: str, depth: int, seen: set[int]) -> Iterator[Held]:
    if isinstance(value, dict):
        for key, item in _full(value):
            yield from _look(item, f"{where}[{key!r}]", _item(value, key), depth, seen)
    elif isinstance(value, list):
        for i, item in _full(dict(enumerate(value))):
            yield from _look(item, f"{where}[{i}]", _item(value, i), depth, seen)
    elif isinstance(value, (tuple, set, frozenset)):
        for i, item in _full(dict(enumerate(value))):
            yield from _look(item, f"{where}[{i}]", None, depth, seen)
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            try:
                yield from _look(cell.cell_contents, where, _cell(cell), depth, seen)
            except ValueError:  # an empty cell
                continue
    elif isinstance(value, MethodType):
        yield from _look(value.__self__, where, None, depth, seen)
    elif isinstance(value, partial):
        yield from _inside([*value.args, *value.keywords.values()], where, depth, seen)
    elif isinstance(getattr(value, "__dict__", None), dict):
        for key, item in _full(value.__dict__):
            yield from _look(item, f"{where}.{key}", _item(value.__dict__, key), depth, seen)


def _cell(cell: CellType) -> Callable[[Any], None]:
    def put(value: Any) -> None:
        cell.cell_contents = value

    return put


def _item(container: Any, key: Any) -> Callable[[Any], None]:
    def put(value: Any) -> None:
        container[key] = value

    return put


def adopt(modules: Modules, recorder: Recorder) -> None:
    """Parameters and buffers that loader code replaced by lazy tensors become plain ones on meta.

    Their memory is the lazy tensor's own, so what they hold is recorded as for any parameter.
    """
    homes: dict[int, torch.Tensor] = {}
    for _, module in modules:
        for registry in (module._parameters, module._buffers):
            for name, lazy in list(registry.items()) if registry else ():
                if not isinstance(lazy, LazyTensor):
                    continue
                home = homes.get(id(lazy))
                if home is None:
                    home = recorder.home_of(lazy)
                    if isinstance(lazy, nn.Parameter):
                        home = nn.Parameter(home, requires_grad=lazy.requires_grad)
                    kept = {k: v for k, v in lazy.__dict__.items() if k not in _OWN}
                    home.__dict__.update(kept)
                    homes[id(lazy)] = home
                registry[name] = home  # type: ignore[assignment]


def leaked_names(sweep: Iterable[Held]) -> set[str]:
    """Checkpoint tensors of which loader code kept something lazy."""
    names: set[str] = set()
    for held in sweep:
        if isinstance(held.tensor, LazyTensor):
            names |= leaf_names(held.tensor.lazy_value())
    return names


def settle(sweep: Iterable[Held], recorder: Recorder) -> None:
    """Give lazy tensors that no checkpoint tensor is part of (``torch.zeros``) their numbers.

    Raises:
        TraceError: one cannot be given numbers, or sits where it cannot be replaced.
    """
    memory: dict[int, torch.Tensor] = {}
    for held in sweep:
        lazy = held.tensor
        if not isinstance(lazy, LazyTensor) or leaf_names(lazy.lazy_value()):
            continue
        if held.put is None:
            raise TraceError(
                f"{held.where} holds a tensor made while loading that cannot be placed"
            )
        real = _numbers(lazy, recorder, memory)
        if isinstance(lazy, nn.Parameter):
            kept = {k: v for k, v in lazy.__dict__.items() if k not in _OWN}
            real = nn.Parameter(real, requires_grad=lazy.requires_grad)
            real.__dict__.update(kept)
        held.put(real)
        held.tensor = real


def _numbers(lazy: LazyTensor, recorder: Recorder, memory: dict[int, torch.Tensor]) -> torch.Tensor:
    """Real memory for a lazy tensor; views of one storage stay views of one memory."""
    from loadkit.tracing.evaluate import strided
    from loadkit.tracing.reading import read_now
    from loadkit.tracing.replay import known_bytes
    from loadkit.tracing.storage import Value
    from loadkit.tracing.view import View

    storage, view = lazy.lazy_storage, lazy.lazy_view
    flat = memory.get(id(storage))
    if flat is None:
        flat = memory[id(storage)] = torch.zeros(
            storage.numel * storage.itemsize, dtype=torch.uint8
        )
        known = known_bytes(storage, len(storage.writes))
        if bool(known.all()) and storage.itemsize == view.itemsize:
            whole = View((storage.numel,), (1,), 0, storage.itemsize)
            value = Value(storage, len(storage.writes), whole, lazy.dtype)
            flat.view(lazy.dtype).copy_(read_now(value, None))
        else:
            strided(flat, view, lazy.dtype).copy_(read_now(lazy.lazy_value(), None))
    return strided(flat, view, lazy.dtype)


def stale(sweep: Iterable[Held], recorder: Recorder) -> Iterator[tuple[str, str | None]]:
    """Attributes on meta whose memory loading wrote to: (where, the parameter it is part of).

    They are views of parameters, or buffers of nobody's: the load would leave them empty.
    """
    parts: dict[int, str] = {}
    others: list[Held] = []
    registered: set[int] = set()
    for held in sweep:
        if held.tensor.device.type != "meta" or isinstance(held.tensor, LazyTensor):
            continue
        key = held.tensor.untyped_storage()._cdata
        if held.is_part and (isinstance(held.tensor, nn.Parameter) or key not in parts):
            parts.setdefault(key, held.where)
            registered.add(id(held.tensor))
        else:
            others.append(held)
    for held in others:
        key = held.tensor.untyped_storage()._cdata
        if id(held.tensor) not in registered and (key in parts or recorder.is_changed(held.tensor)):
            yield held.where, parts.get(key)
