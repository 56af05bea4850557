"""The errors of one tensor that was not placed: everything a person needs, said once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from loadkit.errors import LoadkitError, WeightLoadError
from loadkit.name_hints import grouped_names, likely_prefix
from loadkit.packed_modules import Packed, find_fused
from loadkit.sharded_name import ShardedName
from loadkit.text import nearest, printable
from loadkit.tracing.lazy_tensor import Offered, leaf_file

__all__ = [
    "Unplaced",
    "describe_failure",
    "file_of",
    "members_of",
    "ranks_of",
    "unplaced_error",
    "why_unplaced",
]

_COMPARED = 500  # names that one without a place is compared with

_AXES = ("tp", "pp", "ep")


@dataclass(frozen=True, slots=True)
class Unplaced:
    """A tensor the model has no place for: its names, why, and what was there instead."""

    name: ShardedName
    message: str
    hint: str | None
    available: tuple[str, ...]
    nearest: tuple[str, ...]
    file: str | None


def unplaced_error(module: torch.nn.Module, unplaced: list[Unplaced]) -> WeightLoadError:
    """One error for all tensors without a place: the first in full, the others in few lines."""
    first = unplaced[0]
    message, hint = first.message, first.hint
    if len(unplaced) > 1:
        lines = grouped_names((one.name.checkpoint_name for one in unplaced), limit=10)
        message += f"; {len(unplaced)} tensors have no place: " + "; ".join(lines)
    parameters = [first.name.prefix + name for name, _ in module.named_parameters()]
    prefix = likely_prefix([one.name.path for one in unplaced], parameters)
    if prefix is not None and len(unplaced) > 1:
        hint = prefix if hint is None else f"{prefix}; {hint}"
    return WeightLoadError(
        message,
        code="UNEXPECTED_TENSOR",
        tensor=first.name.checkpoint_name,
        parameter=first.name.path,
        file=first.file,
        detail={
            "unexpected": [one.name.checkpoint_name for one in unplaced[:1000]],
            "count": len(unplaced),
            "available": list(first.available),
            "nearest": list(first.nearest),
        },
        hint=hint,
    )


def members_of(module: torch.nn.Module, packed: Packed | None) -> tuple[str, ...]:
    """The children, parameters and buffers that a module has, sorted, then parts of fused ones."""
    members = {**module._modules, **module._parameters, **module._buffers}
    here = sorted(key for key, value in members.items() if value is not None)
    return (*here, *sorted(part for part in packed or () if find_fused(module, part, packed)))


def why_unplaced(
    module: torch.nn.Module, path: str, rest: list[str], here: tuple[str, ...]
) -> tuple[str, list[str]]:
    """Why ``rest`` has no place in ``module`` at ``path`` (with its dot), for the error.

    Args:
        here: ``members_of`` the module.

    Returns:
        The sentence, and the nearest names. A number has none: another layer is another layer.
    """
    head = rest[0]
    where = f"'{printable(path[:-1])}'" if path else type(module).__name__
    if any(head in held for held in (module._modules, module._parameters, module._buffers)):
        why = f"{where} is made without {head!r}"
    else:
        shown = ", ".join(here[:12]) + (", ..." if len(here) > 12 else "")
        why = f"{where} has no '{printable(head)}'; it has {shown or 'nothing'}"
    close = [] if head.isdecimal() else nearest(head, here[:_COMPARED])
    return why, [path + ".".join([one, *rest[1:]]) for one in close]


def describe_failure(
    error: Exception,
    *,
    name: ShardedName,
    param: torch.Tensor,
    loaded: torch.Tensor | Offered,
    ranks: dict[str, int],
) -> LoadkitError:
    """The typed error for what a weight loader raised.

    A LoadkitError is the same object with its empty fields filled in; anything else becomes a
    WeightLoadError with ``error`` as its cause.
    """
    path = name.path
    facts = _facts(name, param, loaded, ranks)
    if isinstance(error, LoadkitError):
        error.tensor = error.tensor or name.checkpoint_name
        error.parameter = path
        error.file = error.file or file_of(loaded)
        if error.detail is None or isinstance(error.detail, dict):
            error.detail = {**facts, **(error.detail or {})}
        if isinstance(error, WeightLoadError) and printable(error.tensor) not in error.message:
            error.message = f"{_subject(name)}: {error.message}"
            error.args = (error.message,)
        return error
    said = printable(str(error) or "no message", 400, ascii_only=False)
    wrapped = WeightLoadError(
        f"{_subject(name)}: the checkpoint tensor is {_shape(loaded)}, the parameter "
        f"{_shape(param)}{_where(ranks)}; its weight loader failed with "
        f"{type(error).__name__}: {said}",
        tensor=name.checkpoint_name,
        parameter=path,
        file=file_of(loaded),
        detail=facts,
    )
    wrapped.__cause__ = error
    return wrapped


def file_of(tensor: torch.Tensor | Offered) -> str | None:
    """The file a lazy tensor lies in; None for one in memory."""
    return leaf_file(tensor)


def ranks_of(module: torch.nn.Module, param: torch.Tensor) -> dict[str, int]:
    """tp, pp and ep rank and size: the parameter's own, else those of the model's config."""
    config = getattr(module, "parallel_config", None) or getattr(
        getattr(module, "config", None), "parallel_config", None
    )
    found: dict[str, int] = {}
    for axis in _AXES:
        for what in (f"{axis}_rank", f"{axis}_size"):
            value = getattr(param, what, getattr(config, what, None))
            if isinstance(value, int):
                found[what] = value
    return found


def _facts(
    name: ShardedName,
    param: torch.Tensor,
    loaded: torch.Tensor | Offered,
    ranks: dict[str, int],
) -> dict[str, Any]:
    """Everything about the failure as JSON-able values."""
    shard = name.shard_id
    return {
        "tensor": name.checkpoint_name,
        "parameter": name.path,
        "shard_id": shard if shard is None or isinstance(shard, (int, str)) else repr(shard),
        "checkpoint_shape": list(loaded.shape),
        "checkpoint_dtype": str(loaded.dtype).removeprefix("torch."),
        "parameter_shape": list(param.shape),
        "parameter_dtype": str(param.dtype).removeprefix("torch."),
        **ranks,
    }


def _subject(name: ShardedName) -> str:
    """Which tensor, which parameter, which part of it."""
    shard = "" if name.shard_id is None else f" (shard {name.shard_id!r})"
    parameter = printable(name.path)
    return f"tensor '{printable(name.checkpoint_name)}' -> parameter '{parameter}'{shard}"


def _shape(tensor: torch.Tensor | Offered) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _where(ranks: dict[str, int]) -> str:
    """The ranks that are not the only one of their kind."""
    parts = [
        f"{axis} rank {ranks[f'{axis}_rank']} of {ranks[f'{axis}_size']}"
        for axis in _AXES
        if ranks.get(f"{axis}_size", 1) > 1 and f"{axis}_rank" in ranks
    ]
    return f" at {', '.join(parts)}" if parts else ""
