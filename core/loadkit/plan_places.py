"""Everything of a traced model that may have been written to, each once, with its names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from loadkit.local_memory import local_of
from loadkit.module_walk import Modules, named_paths
from loadkit.tracing.lazies import view_of
from loadkit.tracing.lazy_tensor import LazyTensor
from loadkit.tracing.leaks import Held
from loadkit.tracing.recorder import Recorder
from loadkit.tracing.view import View

__all__ = ["Place", "places"]


class Place(NamedTuple):
    """A tensor (of a DTensor, its local part) under all of its names, and the first's module."""

    names: tuple[str, ...]
    tensor: torch.Tensor
    is_parameter: bool
    module: nn.Module


def places(
    model: nn.Module, modules: Modules, recorder: Recorder, sweep: Iterable[Held]
) -> Iterator[Place]:
    """Every parameter, then buffers and other tensors of the model that were written to.

    Parameters that are one view of one memory are one place (tied weights).
    """
    yield from _parameters(model)
    seen: set[int] = set()
    for prefix, module in modules:
        for name, buffer in module._buffers.items():
            if buffer is None or isinstance(buffer, LazyTensor) or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            if recorder.is_changed(memory := local_of(buffer)):
                yield Place((_dotted(prefix, name),), memory, False, module)
    yield from _held_elsewhere(model, recorder, sweep)


def _parameters(model: nn.Module) -> Iterator[Place]:
    names: dict[tuple[int, View | None], list[str]] = {}
    first: dict[tuple[int, View | None], tuple[torch.Tensor, nn.Module]] = {}
    for prefix, module in named_paths(model):
        registry: dict[str, Any] = module._parameters
        for name, param in registry.items():
            if param is None or isinstance(param, LazyTensor):
                continue
            if is_lazy(param):
                key: tuple[int, View | None] = (id(param), None)
            else:
                param = local_of(param)
                key = (param.untyped_storage()._cdata, view_of(param))
            names.setdefault(key, []).append(_dotted(prefix, name))
            first.setdefault(key, (param, module))
    for key, (param, module) in first.items():
        yield Place(tuple(names[key]), param, True, module)


def _held_elsewhere(model: nn.Module, recorder: Recorder, sweep: Iterable[Held]) -> Iterator[Place]:
    """Real tensors beside parameters and buffers that were written to: attributes, mostly."""
    done: set[int] | None = None  # memory of what is a place already
    for held in sweep:
        if held.is_part or isinstance(held.tensor, LazyTensor):
            continue
        if held.tensor.device.type == "meta" or held.tensor.layout != torch.strided:
            continue
        key = held.tensor.untyped_storage()._cdata
        storage = recorder.tracked(held.tensor)
        if storage is None or storage.real is None:
            continue
        if done is None:
            done = set(_memory_of_parts(model))
        if key in done:
            continue
        done.add(key)
        if storage.writes:
            yield Place((held.where,), storage.real, False, model)


def _memory_of_parts(model: nn.Module) -> Iterator[int]:
    """The memory of every parameter and buffer that has some."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not isinstance(tensor, LazyTensor) and not is_lazy(tensor):
            yield local_of(tensor).untyped_storage()._cdata


def _dotted(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
