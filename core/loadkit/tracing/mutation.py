"""Writes for which torch has no operation that makes a new tensor (custom operators, mostly)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from loadkit.tracing.lazies import as_lazy, untraceable
from loadkit.tracing.lazy_tensor import LazyTensor
from loadkit.tracing.schema import map_all
from loadkit.tracing.storage import Operation, Storage
from loadkit.tracing.view import contiguous
from loadkit.tracing.writes import record_copy

if TYPE_CHECKING:
    from loadkit.tracing.recorder import Recorder

__all__ = ["Mutation", "mutate"]


class Mutation:
    """An operation that writes to the argument ``name``, as one that makes a new tensor."""

    tags: tuple[Any, ...] = ()

    def __init__(self, func: Any, name: str) -> None:
        self.func = func
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        names = (argument.name for argument in self.func._schema.arguments)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        target: torch.Tensor = given[self.name].clone(memory_format=torch.contiguous_format)
        given[self.name] = target
        self.func(**given)
        return target

    def __repr__(self) -> str:
        return str(self.func)


def mutate(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    recorder: Recorder | None,
    target: torch.Tensor,
) -> Any:
    """Record a call that writes to ``target``, its one written argument.

    Raises:
        TraceError: what it writes is random, or it makes another tensor beside.
    """
    if torch.Tag.nondeterministic_seeded in func.tags:
        raise untraceable(func, (args, kwargs), "its result is random")
    if any(result.alias_info is None for result in func._schema.returns):
        raise untraceable(func, (args, kwargs), "it writes to a tensor and makes another")
    name = next(a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write)
    values = map_all((args, kwargs), lambda t: as_lazy(t, recorder).lazy_value())
    view = contiguous(tuple(target.size()), target.dtype.itemsize)
    call = Operation(Mutation(func, name), values[0], values[1], None, view, target.dtype)
    result = LazyTensor(Storage(call, view.numel, view.itemsize), view, target.dtype)
    record_copy(target, result, recorder)
    return target if func._schema.returns else None
