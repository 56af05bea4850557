"""What a call is, from its schema alone, and the trees of arguments that calls have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch

__all__ = [
    "DYNAMIC",
    "FACTORIES",
    "OpKind",
    "aten",
    "fill_of",
    "functional",
    "kind_of",
    "makes_numbers_on_meta",
    "map_all",
    "map_tensors",
    "reads_no_memory",
    "tensors_in",
]


aten = torch.ops.aten

DYNAMIC = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


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


@cache
def functional(func: Any) -> Any:
    """``aten.add_.Tensor`` -> ``aten.add.Tensor``, or None."""
    name = func._schema.name.removeprefix("aten::")
    packet = getattr(aten, name.removesuffix("_"), None) if name.endswith("_") else None
    return getattr(packet, func._overloadname, None) if packet is not None else None


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


def map_all(tree: Any, make: Callable[[torch.Tensor], Any]) -> Any:
    """The tree with ``make`` of each tensor, in tuples, lists and dicts."""
    if isinstance(tree, torch.Tensor):
        return make(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_all(item, make) for item in tree)
    if isinstance(tree, dict):
        return {key: map_all(item, make) for key, item in tree.items()}
    return tree


def map_tensors(tree: Any, make: Callable[[torch.Tensor], Any]) -> Any:
    """The tree with ``make`` of each tensor, in tuples and lists: a call's results."""
    if isinstance(tree, torch.Tensor):
        return make(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tensors(item, make) for item in tree)
    return tree


def reads_no_memory(func: Any, tree: Any) -> bool:
    """Whether a call would ask memory on meta for numbers, beside real tensors or alone."""
    devices = {t.device.type for t in tensors_in(tree) if t.dim() or t.device.type == "meta"}
    if "meta" not in devices:
        return False
    return len(devices) > 1 or bool(DYNAMIC & set(func.tags))


def makes_numbers_on_meta(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call makes numbers out of nothing (``arange``), where they would be lost."""
    device = kwargs.get("device")
    return (
        device is not None
        and torch.device(device).type == "meta"
        and next(tensors_in(args), None) is None
    )


def fill_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The number that a factory fills its result with; None: it leaves it as it is."""
    fill = FACTORIES[func]
    if fill == "zero":
        return 0
    if fill == "one":
        return 1
    if isinstance(fill, int):
        return args[fill] if len(args) > fill else kwargs.get("fill_value")
    return None


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
